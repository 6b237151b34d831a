"""The box's side: joining, the agent that calls the head, and the files that it fetches and sends."""

from windlass.service.cluster.box.agent import run_agent as run_agent
