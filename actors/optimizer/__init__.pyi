"""The CPU optimizer, which updates chunks, and loads and exports the model."""

from windlass.actors.optimizer.chunk_pipeline import ChunkPipeline as ChunkPipeline
from windlass.actors.optimizer.chunk_updater import ChunkUpdater as ChunkUpdater
from windlass.actors.optimizer.model_process import ModelProcess as ModelProcess
from windlass.actors.optimizer.worker import CpuOptimizer as CpuOptimizer
