"""What tests on real Ray decide by: small times, and two tenants that share."""

POLICY = {
    "sample_period_seconds": 0.5,
    "kill_patience_seconds": 0.5,
    "consolidation": 10,
    "retry_first_seconds": 0.2,
    "learned_least_runs": 3,
    "overuse": "stop",
    "streams": {"release": 1, "nightly": 1},
    "tenants": {
        "owner": {"cohort": "lab", "guaranteed_mb": 24_000},
        "guest": {"cohort": "lab", "guaranteed_mb": 10_000},
    },
}
