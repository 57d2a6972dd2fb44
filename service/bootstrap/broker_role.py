"""The role that decides and acts: the leader's loop and what carries out its orders."""

from collections.abc import Sequence

from service.adapters.blobs.directory import DirectoryBlobs
from service.adapters.sql.store import SqlStore
from service.bootstrap.compose import inventory_rules_of, new_executor, policy_of
from service.bootstrap.picture import Job, Picture
from service.broker.dispatch import Dispatcher
from service.broker.loop import Leader
from service.broker.observe import Observer
from service.core.backfill import Forecast
from service.core.units import Term
from service.settings import Settings


class BrokerRole:
    def __init__(
        self, name: str, settings: Settings, store: SqlStore, picture: Picture, blobs: DirectoryBlobs
    ) -> None:
        self._store = store
        self._blobs = blobs
        self.executor = new_executor(settings, picture.clock)
        policy = policy_of(settings)
        self._leader = Leader(
            name=name,
            world=picture.world,
            policy=policy,
            store=store,
            executor=self.executor,
            observer=Observer(
                picture.world,
                policy,
                blobs,
                inventory_rules_of(settings),
                settings.limits.inline_bytes,
                picture.progress,
            ),
            dispatcher=Dispatcher(store, blobs, self.executor, picture.world, picture.clock),
            clock=picture.clock,
        )
        picture.listen(self._leader.on_events)

    def jobs(self) -> list[Job]:
        return [
            ("leader", self._leader.run()),
            ("objects", self._blobs.keep_clean(self._store.referenced)),
        ]

    def term(self) -> Term | None:
        """None while it does not lead."""
        return self._leader.leadership.term if self._leader.leadership.leading else None

    def forecasts(self) -> Sequence[Forecast]:
        return self._leader.foresight.forecasts

    async def close(self, *, stop_cluster: bool) -> None:
        await self.executor.close(stop_cluster=stop_cluster)
