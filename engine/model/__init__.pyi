"""Partitions a model into blocks, computes them one by one, and checks this against plain autograd."""

from windlass.engine.model.block_runner import BlockRunner as BlockRunner
from windlass.engine.model.block_runner import GroupActivations as GroupActivations
from windlass.engine.model.fake_mode import fake_tensors as fake_tensors
from windlass.engine.model.fused_kernels import apply_kernels as apply_kernels
from windlass.engine.model.fused_kernels import kernels_here as kernels_here
from windlass.engine.model.grad_buffer import GradBuffer as GradBuffer
from windlass.engine.model.grad_buffer import GradSink as GradSink
from windlass.engine.model.grad_buffer import LaneSums as LaneSums
from windlass.engine.model.gradient_check import check_architecture as check_architecture
from windlass.engine.model.gradient_check import check_kernels as check_kernels
from windlass.engine.model.head_slices import LossSums as LossSums
from windlass.engine.model.layout import CHUNK_GRANULE as CHUNK_GRANULE
from windlass.engine.model.layout import MODELS_MODULE as MODELS_MODULE
from windlass.engine.model.layout import BlockLayout as BlockLayout
from windlass.engine.model.layout import ModelLayout as ModelLayout
from windlass.engine.model.layout import ParamSlice as ParamSlice
from windlass.engine.model.layout import UnsupportedArchitectureError as UnsupportedArchitectureError
from windlass.engine.model.layout import choose_chunk_numel as choose_chunk_numel
from windlass.engine.model.partition import ParamSite as ParamSite
from windlass.engine.model.partition import Partition as Partition
from windlass.engine.model.partition import build_meta_model as build_meta_model
from windlass.engine.model.partition import dropouts_of as dropouts_of
from windlass.engine.model.partition import load_config as load_config
from windlass.engine.model.partition import partition_folder as partition_folder
from windlass.engine.model.streaming import PieceBuffers as PieceBuffers
from windlass.engine.model.streaming import StreamedParams as StreamedParams
