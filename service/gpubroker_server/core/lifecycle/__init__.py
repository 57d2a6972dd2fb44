"""The life of everything that runs: reports, deadlines, stopping, quarantine, learning."""
