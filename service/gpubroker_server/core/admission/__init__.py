"""Admission turns a submission into a task or its refusals, in one pure pass for every kind of submitter."""
