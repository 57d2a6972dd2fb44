"""Requests to models: queues, slots, the circuit breaker, batching and tensors."""
