"""Commands that submit, show and change tasks."""
