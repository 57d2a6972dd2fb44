"""The expendable process that talks to Ray, and the executor that keeps it."""
