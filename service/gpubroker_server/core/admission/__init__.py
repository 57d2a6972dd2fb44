"""The way from a submission to a task or its refusals: one pure pass, for every kind of submitter."""
