"""Every setting once; the only reader of files, environment and flags."""
