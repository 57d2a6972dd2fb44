"""The service, for which a clock is steady after a minute: `python -m tests.bootstrap.steady_soon serve`."""

from gpubroker_server.__main__ import main
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.lifecycle import clock_evidence

STEADY_SECONDS = Seconds(60.0)

if __name__ == "__main__":
    clock_evidence.STEADY_SECONDS = STEADY_SECONDS
    main()
