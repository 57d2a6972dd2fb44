"""Worker sets: how many workers are wanted, and which come and leave."""
