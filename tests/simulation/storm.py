"""A storm of faults over several processes of the broker, drawn from a seed, on one timeline.

What decides is the product's: candidates, leaders, pictures, pruners, the core. Time, network, database,
machines and people are made up, and every one of them may fail at any step. When the steps are over all works
again; then what was accepted must come to its end, and the log must tell a story that may be told.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from gpubroker_server.bootstrap import follower as bootstrap_picture
from gpubroker_server.bootstrap.follower import fill
from gpubroker_server.broker import leadership, loop
from gpubroker_server.core.domain.policy import CustomLimit, Policy
from gpubroker_server.core.domain.task import TERMINAL
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.lifecycle.clock_evidence import STEADY_SECONDS
from gpubroker_server.core.world.events import Event
from gpubroker_server.core.world.world import World
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.contracts.scenes import picture
from tests.memory_blobs import Blobs
from tests.simulation.auditor import Auditor, Violation
from tests.simulation.broker import Process, Site
from tests.simulation.line_to_database import Database
from tests.simulation.machine import Machine
from tests.simulation.people import People
from tests.simulation.timeline import Timeline
from tests.simulation.virtual_loop import Host
from tests.simulation.wires import Network
from tests.stores import at_once

START = 1_700_000_000.0
POLICY = Policy(
    custom_limits=(CustomLimit("licence", 3.0),),
    kill_patience_seconds=Seconds(3.0),
    pledge_patience_seconds=Seconds(3.0),
    retry_first_seconds=Seconds(0.2),
)
GPUS = {"n1": 2, "n2": 1, "n3": 1}
PATIENCE_SECONDS = 900.0
"""So long after the storm every task must have come to its end."""
LOOK_SECONDS = 1.0
HOUR = 3600.0
POINTS = tuple(
    f"{side} {what}"
    for what in ("commit", "commit", "commit", "send", "send", "renew", "take term", "specs", "catch up")
    for side in ("before", "after")
)


@dataclass
class StormReport:
    seed: int
    steps: int
    acknowledged: int = 0
    lost: int = 0
    accepted_twice: int = 0
    double_leased_mb: int = 0
    leases_left: int = 0
    terms: int = 0
    events: int = 0
    virtual_seconds: float = 0.0
    digest: str = ""
    faults: Counter[str] = field(default_factory=Counter)
    """Kind -> how often."""
    wrong: list[str] = field(default_factory=list)
    """In words."""


@contextmanager
def rarer_looks() -> Iterator[None]:
    """To look whether there is something new takes most of the time if there is nothing, as mostly here."""
    known = {
        (loop, "TICK_SECONDS"): 1.0,
        (leadership, "POLL_SECONDS"): (0.2, 0.8),
        (bootstrap_picture, "POLL_SECONDS"): (0.2, 1.0),
    }
    before = {(module, name): getattr(module, name) for module, name in known}
    try:
        for (module, name), value in known.items():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def storm(seed: int, steps: int, only: Sequence[str] = ()) -> StormReport:
    """The same for the same seed, on every machine where Python hashes strings in the same way. `only`: some
    kinds of faults, instead of those that the seed chooses."""
    random.seed(seed)  # what the product draws by itself: when a picture looks at the log
    whole = Storm(seed, only)
    try:
        with capture_logs() as logs, rarer_looks():
            whole.run(steps)
    except Violation as violation:
        whole.site.faults.append(str(violation))
    finally:
        whole.close()
    errors = [str(line) for line in logs if line["log_level"] in ("error", "critical")]
    return whole.report(seed, steps, errors)


class Storm:
    def __init__(self, seed: int, only: Sequence[str] = ()) -> None:
        self._chance = Random(f"{seed}/storm")
        self._timeline = Timeline(START)
        database = Database(self._timeline)
        network = Network(self._timeline, Random(f"{seed}/network"), self._look)
        policy = replace(POLICY, forecasts=self._chance.choice((0, 0, 0, 8)))
        self.site = Site(self._timeline, database, network, Blobs(), policy)
        self._auditor = Auditor(network.machines.values, times_are_kept=False)
        database.listen(self._on_events)
        people, workload = Random(f"{seed}/people"), Random(f"{seed}/workload")
        self._people = People(self._timeline, database, POLICY, len(GPUS), people, workload)
        for name, gpus in GPUS.items():
            network.add(name, gpus, self._people.programs, Random(f"{seed}/{name}"))
        self._processes = [self._process(seed, number) for number in range(self._chance.choice((2, 2, 3)))]
        self._faults: Counter[str] = Counter()
        self._strikes = self._chosen(only)
        network.disorder = self._chance.choice((0.0, 0.5, 3.0))
        database.answers_lost = self._chance.choice((0.0, 1.0, 5.0))

    def run(self, steps: int) -> None:
        """Raises Violation."""
        for process in self._processes:
            process.start()
        self._pass(self._chance.uniform(0.0, 4.0))
        for _ in range(steps):
            self._step()
            self._look()
            self._pass(self._pause())
        self._make_good()
        self._wait_for_the_ends()

    def close(self) -> None:
        for process in self._processes:
            process.close()
        at_once(self.site.database.close())

    def report(self, seed: int, steps: int, errors: Sequence[str]) -> StormReport:
        seen = self._auditor.history
        missing = sorted(
            task
            for task in self._people.told
            if task not in seen.tasks or seen.tasks[task].state not in TERMINAL
        )
        excess = max((device.excess_mb for device in seen.devices.values()), default=0)
        wrong = [*self.site.faults, *self._people.contradictions, *errors, *seen.violations]
        return StormReport(
            seed=seed,
            steps=steps,
            acknowledged=len(self._people.told),
            lost=len(missing),
            accepted_twice=len(self._people.contradictions),
            double_leased_mb=excess,
            leases_left=len(seen.leases),
            terms=self.site.terms_led,
            events=len(self.site.database.plain),
            virtual_seconds=self._timeline.now() - START,
            digest=self._auditor.digest,
            faults=self._faults,
            wrong=[*wrong, *(f"not there or not ended: {task}" for task in missing)][:20],
        )

    def _process(self, seed: int, number: int) -> Process:
        """Clocks of machines differ by less than the margin of a lease."""
        host = Host(self._timeline, self._chance.uniform(0.95, 1.05))
        return Process(f"broker{number}", self.site, host, Random(f"{seed}/broker{number}"))

    # Steps

    def _step(self) -> None:
        act = self._chance.choices(
            (
                self._nothing,
                self._people.submit,
                self._submit_a_batch,
                self._people.insist,
                self._people.change_a_mind,
            ),
            (60, 20, 2, 3, 6),
        )[0]
        if self._strikes and self._chance.random() < self._fierceness:
            act = self._strike
        act()

    def _pause(self) -> float:
        """Most things happen right after one another, some later."""
        low, high = self._chance.choices(((0.0, 0.01), (0.01, 0.3), (0.3, 2.5)), (60, 36, 4))[0]
        return self._chance.uniform(low, high)

    def _nothing(self) -> None:
        """Only time passes."""

    def _submit_a_batch(self) -> None:
        self._people.submit(self._chance.randint(2, 4))

    def _chosen(self, only: Sequence[str]) -> list[tuple[str, Callable[[], None]]]:
        """Each storm has some of all faults, and more or less of them."""
        known: dict[str, Callable[[], None]] = {
            "kill": self._kill,
            "clean stop": self._stop_cleanly,
            "pause": self._pause_a_process,
            "suspend": self._suspend,
            "kill at a point": self._kill_at,
            "pause at a point": self._pause_at,
            "database away": self._lose_database,
            "process without database": self._cut_off,
            "clock set": self._set_clock,
            "clock slewed": self._slew_clock,
            "line cut": self._cut_line,
            "node cut": self._cut_node,
            "messages lost": self._lose_messages,
            "power lost": self._lose_power,
            "agent lost": self._lose_agent,
        }
        self._fierceness = self._chance.choice((0.05, 0.15, 0.4))
        names = self._chance.sample(sorted(known), self._chance.randint(1, len(known)))
        return [(name, known[name]) for name in only or sorted(names)]

    def _strike(self) -> None:
        name, fault = self._chance.choice(self._strikes)
        self._faults[name] += 1
        fault()

    # What breaks

    def _victim(self) -> Process:
        """More often the one that leads."""
        leading = [process for process in self._processes if process.term is not None]
        return self._chance.choice(leading * 2 + self._processes)

    def _kill(self) -> None:
        self._dead(self._victim())

    def _dead(self, process: Process) -> None:
        process.kill()
        self._timeline.after(self._chance.choice((0.1, 1.0, 6.0)) * self._chance.random(), process.start)

    def _stop_cleanly(self) -> None:
        process = self._victim()
        process.leave()
        self._timeline.after(self._chance.uniform(1.5, 5.0), process.start)

    def _pause_a_process(self) -> None:
        self._pause_one(self._victim())

    def _pause_one(self, process: Process) -> None:
        if not process.is_dead:
            process.loop.stop_for(self._chance.choice((0.5, 3.0, 12.0)) * self._chance.random())

    def _suspend(self) -> None:
        """The machine sleeps: its CLOCK_BOOTTIME goes on, and no timer does."""
        self._victim().host.sleep(self._chance.choice((1.0, 5.0, 20.0)) * self._chance.random())

    def _kill_at(self) -> None:
        process = self._victim()
        process.strike(self._chance.choice(POINTS), lambda: self._dead(process))

    def _pause_at(self) -> None:
        process = self._victim()
        process.strike(self._chance.choice(POINTS), lambda: self._pause_one(process))

    def _lose_database(self) -> None:
        database = self.site.database
        database.is_away = True
        self._timeline.after(self._chance.choice((0.3, 6.0)) * self._chance.random(), self._find_database)

    def _find_database(self) -> None:
        self.site.database.is_away = False

    def _cut_off(self) -> None:
        process = self._victim()
        process.is_cut_off = True

        def mend() -> None:
            process.is_cut_off = False

        self._timeline.after(self._chance.uniform(0.1, 8.0), mend)

    def _set_clock(self) -> None:
        """By an hour, or by a little, forward and back."""
        by = self._chance.choice((HOUR, 30.0, 3.0, 0.2)) * self._chance.choice((-1.0, 1.0))
        self.site.database.set_clock(self.site.database.now() + by)

    def _slew_clock(self) -> None:
        self.site.database.set_clock(self.site.database.now(), self._chance.uniform(0.9, 1.1))

    def _machine(self) -> Machine:
        return self._chance.choice(list(self.site.network.machines.values()))

    def _cut_line(self) -> None:
        self.site.network.cut(self._victim().name, self._machine().name, self._chance.uniform(0.1, 30.0))

    def _cut_node(self) -> None:
        machine, seconds = self._machine(), self._chance.uniform(0.1, 30.0)
        for process in self._processes:
            self.site.network.cut(process.name, machine.name, seconds)

    def _lose_messages(self) -> None:
        self.site.network.lose_messages(self._machine())

    def _lose_power(self) -> None:
        self.site.network.lose_power(self._machine(), self._chance.uniform(1.0, 20.0))

    def _lose_agent(self) -> None:
        with_processes = self._chance.random() < 0.5
        seconds = self._chance.uniform(0.1, 8.0)
        self.site.network.lose_agent(self._machine(), seconds, with_processes=with_processes)

    # Time

    def _pass(self, seconds: float) -> None:
        until = self._timeline.now() + seconds
        while self._timeline.next_at() <= until:
            self._timeline.step()
        self._timeline.at(until, lambda: None)
        self._timeline.step()

    def _look(self) -> None:
        self._auditor.look()
        if self.site.faults:
            raise Violation(self.site.faults.pop())

    def _on_events(self, events: Sequence[Event]) -> None:
        self._auditor.read(self.site.database.plain[-len(events) :])

    # After the storm

    def _make_good(self) -> None:
        """Everything works again, and the time is no earlier than it has ever been."""
        site = self.site
        site.network.disorder = site.database.answers_lost = 0.0
        self._find_database()
        site.database.set_clock(max(site.database.latest, site.database.now()))
        site.network.mend_all()
        for process in self._processes:
            process.spare()
            process.is_cut_off = False
            self._timeline.after(30.0, process.start)
        self._people.is_at_home = True

    def _wait_for_the_ends(self) -> None:
        # A database whose clock has stayed ahead counts after a while, and only then do times fall due that
        # people set by it.
        until = self._timeline.now() + STEADY_SECONDS + PATIENCE_SECONDS
        while left := self._left():
            if self._timeline.now() > until:
                raise Violation(f"everything ends: {len(left)} did not: {left[:5]}")
            self._pass(LOOK_SECONDS)
            self._people.let_go()
            self._look()
        while wrong := self._differences():
            if self._timeline.now() > until:
                raise Violation(wrong)
            self._pass(LOOK_SECONDS)

    def _left(self) -> list[str]:
        history = self._auditor.history
        untold = [task for task in self._people.told if task not in history.tasks]
        return [*untold, *self._auditor.unfinished()]

    def _differences(self) -> str:
        """What a process sees and the rows do not say; a sleeping process is waited for."""
        rows = World()
        fill(rows, at_once(self.site.database.snapshot()))
        expected = picture(rows)
        for process in self._processes:
            seen = {} if process.is_dead else picture(process.picture.world)
            for part in seen:
                if seen[part] != expected[part]:
                    return f"{process.life} sees other {part} than there is"
        return ""
