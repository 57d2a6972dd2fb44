"""Databases as earlier releases have written them, and the script that wrote them."""
