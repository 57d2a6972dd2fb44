"""The local Ray head: started apart from the service, adopted after a restart."""
