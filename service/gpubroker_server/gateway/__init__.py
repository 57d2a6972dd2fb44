"""The gateway speaks HTTP: it parses, admits, stores, and shows. It decides nothing and changes no state."""
