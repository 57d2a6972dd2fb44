"""NVIDIA's library as the service calls it, answered by a stand-in that a test controls."""
