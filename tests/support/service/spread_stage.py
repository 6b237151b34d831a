"""A head and a box with real dispatchers and an agent, and stand-in runners, for jobs over both."""

from pathlib import Path
from typing import Any

from sqlalchemy import update

from tests.support.service.boxes import make_capacity, make_facts
from tests.support.service.cluster_stage import NAME, Cluster, add_box
from tests.support.service.dispatcher_stage import Stage
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.planner.stages.stages_plan import StagePlan, StagesPlan
from windlass.service.cluster.box.agent import Agent, BoxFunctions
from windlass.storage.sql.database import Database
from windlass.storage.sql.models import Job, JobPart
from windlass.storage.sql.repositories.boxes import BoxRepository, PartRepository, PartState

STAGES = tuple(
    StagePlan(
        box=box, first_block=first, stop_block=stop, placement=Placement(group_size=1), num_optimizers=1, peak_gib={}
    )
    for box, first, stop in (("head", 0, 2), (NAME, 2, 4))
)
PLAN = StagesPlan(num_ranks=1, num_microbatches=2, update_order=UpdateOrder.KEPT, step_s=None, stages=STAGES)


class Spread(Cluster):
    """Two boxes that can reach each other."""

    def __init__(self, folder: Path, head: Database, box: Database) -> None:
        super().__init__(folder, head, box)
        for stage in (self.head, self.box):
            stage.settings = stage.settings.model_copy(update={"link_host": "127.0.0.1"})
            folder = stage.settings.home / "cluster"
            folder.mkdir(exist_ok=True)
            for name in ("link.pem", "authority.pem"):
                (folder / name).write_text("")
            stage.new_dispatcher()
        self.agent.close()
        self.new_agent()
        self.agent.tick()

    def new_agent(self) -> Agent:
        functions = BoxFunctions(facts=lambda: make_facts(link_host="127.0.0.1"), capacity=make_capacity)
        settings, link = self.box.settings, self.link
        self.agent = Agent(self.box.database, settings, link, functions, name=NAME, clock=lambda: self.now)
        return self.agent

    def add_box(self, name: str) -> str:
        """One more box, which has called just now. Returns its id."""
        box = add_box(self.head.database, name, f"home-of-{name}", head=self.head.node)
        with self.head.database.write() as session:
            BoxRepository(session).set(
                box.id,
                facts=make_facts(link_host="127.0.0.1").model_dump(mode="json"),
                capacity=make_capacity().model_dump(mode="json"),
            )
        return box.id

    def go_on(self, is_so: Any) -> None:
        """Lets both boxes work until something is so."""

        def look() -> bool:
            self.head.now += 1
            self.box.now += 1
            self.head.tick()
            return bool(is_so())

        self.until(look)

    def divide(self, **windlass: Any) -> str:
        """A job whose plan over both boxes was made."""
        job_id = self.prepare(boxes=2, **windlass)
        self.head.tick()
        self.head.stage_planners[-1].answer = PLAN
        self.head.tick()
        return job_id

    def run(self) -> str:
        """A job of which both boxes serve the first attempt."""
        job_id = self.divide()
        self.go_on(lambda: self.box.runners.alive)
        return job_id

    def forget_division(self, job_id: str, hyperparameters: Any) -> None:
        """Makes the head one that was restored from a backup that is older than the job's division."""
        (self.head.settings.jobs_dir / job_id / "prepare" / "stages.json").unlink()
        with self.head.database.write() as session:
            PartRepository(session).remove(job_id)
            values = {"attempt": 0, "num_lost": 0, "hyperparameters": hyperparameters}
            session.execute(update(Job).where(Job.id == job_id).values(**values))
        self.agent.tick()

    def begin(self, job_id: str) -> None:
        """Lets the first attempt begin: all boxes are connected."""
        journal = self.head.journal(job_id, 1)
        journal.append("message", "Loading the model's weights into the tensor store")
        journal.close()
        self.head.tick()

    def divide_beside(self, other: str) -> str:
        """A part whose attempt is wanted on the box, though another job runs there."""
        job_id = self.prepare(boxes=2)
        with self.box.database.write() as session:
            parts = PartRepository(session)
            parts.add(job_id, self.box.node, position=1, state=PartState.READY)
            parts.want(job_id, self.box.node, attempt=1, link={}, is_over=False)
        return job_id

    def part(self, job_id: str, stage: Stage | None = None) -> JobPart | None:
        """The box's part of a job, as the head knows it, or as the box does."""
        with (stage or self.head).database.read() as session:
            return PartRepository(session).find(job_id, self.box.node)

    def state(self, job_id: str) -> str | None:
        part = self.part(job_id)
        return None if part is None else part.state

    def end_attempt(self, job_id: str, status: str, **error: Any) -> None:
        """Ends the attempt on both boxes, as runners do."""
        attempt = self.head.job(job_id).attempt
        journal = self.head.journal(job_id, attempt)
        journal.append_outcome(status, "over", **error)
        journal.close()
        self.head.end_runner(job_id, attempt)
        self.box.end_runner(job_id, attempt)
