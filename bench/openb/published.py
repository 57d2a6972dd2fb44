"""The published results: GPUs allocated, in % of all, when tasks requesting 130 % of them have arrived.

Means of 10 seeds, from hkust-adsl/kubernetes-scheduler-simulator,
experiments/analysis/expected_results/analysis_allo_discrete.csv.
"""

POLICIES = ("random", "dot_product", "clustering", "packing", "best_fit", "fgd")
"""The order of the columns below."""

AT_130: dict[str, tuple[float, ...]] = {
    "default": (87.47, 90.85, 91.88, 92.00, 93.08, 95.39),
    "cpu050": (91.24, 93.27, 93.79, 93.72, 93.79, 95.21),
    "cpu100": (89.11, 91.95, 92.64, 92.72, 93.44, 95.35),
    "cpu200": (83.77, 87.70, 89.92, 90.22, 92.40, 95.05),
    "cpu250": (80.42, 83.81, 87.99, 88.28, 91.45, 93.41),
    "gpushare40": (86.00, 89.56, 90.02, 90.03, 91.69, 94.15),
    "gpushare60": (83.65, 87.11, 87.20, 87.45, 89.36, 91.40),
    "gpushare80": (81.22, 84.49, 84.85, 85.00, 87.01, 89.30),
    "gpushare100": (79.44, 82.42, 82.65, 82.57, 85.01, 86.90),
    "multigpu20": (88.69, 92.06, 93.56, 93.71, 93.93, 95.65),
    "multigpu30": (89.27, 93.28, 94.72, 94.87, 94.72, 96.46),
    "multigpu40": (90.09, 94.19, 95.50, 95.74, 95.23, 96.99),
    "multigpu50": (90.27, 94.85, 95.81, 96.18, 95.74, 97.18),
    "gpuspec10": (87.43, 90.39, 92.18, 92.46, 93.30, 94.95),
    "gpuspec20": (87.24, 89.97, 92.25, 92.94, 93.30, 94.84),
    "gpuspec25": (86.94, 89.63, 92.08, 92.98, 93.23, 94.74),
    "gpuspec33": (86.46, 89.14, 92.12, 93.22, 93.09, 94.55),
}

AT_100: dict[tuple[str, str], float] = {
    ("default", "best_fit"): 92.86,
    ("default", "fgd"): 95.23,
    ("gpuspec25", "fgd"): 93.91,
    ("gpuspec33", "fgd"): 87.84,
}
"""The published results when tasks requesting 100 % of all GPUs have arrived; only some values were looked
up."""


def published(trace: str, policy: str, arrival: int) -> float | None:
    """Return the published mean; None if it is unknown. A synthetic trace is compared with the one it
    imitates, and `gpubroker` with FGD, the best published policy."""
    family = trace.removeprefix("synthetic-")
    column = "fgd" if policy == "gpubroker" else policy
    if arrival == 100:
        return AT_100.get((family, column))
    if arrival == 130 and family in AT_130 and column in POLICIES:
        return AT_130[family][POLICIES.index(column)]
    return None
