"""One file per resource. Each says what its operations take, answer and refuse; none holds a rule."""
