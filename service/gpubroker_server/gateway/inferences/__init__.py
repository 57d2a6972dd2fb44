"""Queued inferences: requests to models that wait as durable tasks."""
