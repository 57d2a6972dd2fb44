"""Requests to models: queues, slots, circuit breaker, batching, tensors."""
