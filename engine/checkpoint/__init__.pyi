"""Model folders in Hugging Face's format: read, checked, initialized, and written."""

from windlass.engine.checkpoint.atomic_folder import make_partial_folder as make_partial_folder
from windlass.engine.checkpoint.atomic_folder import remove_partial_folders as remove_partial_folders
from windlass.engine.checkpoint.initialization import BlockInitializer as BlockInitializer
from windlass.engine.checkpoint.model_exporter import ModelExporter as ModelExporter
from windlass.engine.checkpoint.model_folder import copy_file as copy_file
from windlass.engine.checkpoint.model_folder import copy_model_folder as copy_model_folder
from windlass.engine.checkpoint.model_folder import folder_nbytes as folder_nbytes
from windlass.engine.checkpoint.model_folder import remove_model_folder as remove_model_folder
from windlass.engine.checkpoint.reader import CheckpointReader as CheckpointReader
from windlass.engine.checkpoint.safetensors_file import TensorReader as TensorReader
from windlass.engine.checkpoint.safetensors_file import encode_header as encode_header
from windlass.engine.checkpoint.safetensors_file import list_tensors as list_tensors
