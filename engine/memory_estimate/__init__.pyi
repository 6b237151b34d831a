"""Estimates the device memory of a model's layers by dry runs without data."""

from windlass.engine.memory_estimate.activation_memory import ActivationNeedUnknownError as ActivationNeedUnknownError
from windlass.engine.memory_estimate.activation_memory import activation_need as activation_need
from windlass.engine.memory_estimate.device_peak import device_need as device_need
from windlass.engine.memory_estimate.dry_run import DryRun as DryRun
from windlass.engine.memory_estimate.dry_run import DryRunResult as DryRunResult
from windlass.engine.memory_estimate.dry_run import unknown_where as unknown_where
from windlass.engine.memory_estimate.model_facts import DeviceNeedUnknownError as DeviceNeedUnknownError
from windlass.engine.memory_estimate.model_facts import ModelFacts as ModelFacts
from windlass.engine.memory_estimate.model_facts import Passes as Passes
from windlass.engine.memory_estimate.model_facts import PassNeeds as PassNeeds
from windlass.engine.memory_estimate.traced_facts import TracedFacts as TracedFacts
