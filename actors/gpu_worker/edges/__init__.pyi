"""The ends of a GPU worker for all that passes between boxes: hidden states, their gradients, and shared params."""

from windlass.actors.gpu_worker.edges.shared_params import SharedParams as SharedParams
from windlass.actors.gpu_worker.edges.stage_edges import StageEdges as StageEdges
