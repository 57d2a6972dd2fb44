"""What becomes of whatever runs: reports, deadlines, stopping, quarantine, learning."""
