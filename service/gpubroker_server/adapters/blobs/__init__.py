"""Where large bytes are kept: objects by their digest."""
