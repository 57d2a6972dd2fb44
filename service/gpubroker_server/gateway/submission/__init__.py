"""Submission of tasks: a body is translated, admitted, and stored in one commit."""
