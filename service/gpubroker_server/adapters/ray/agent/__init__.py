"""The node agent and the processes of its runs."""
