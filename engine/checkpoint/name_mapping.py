"""Maps the tensors of a checkpoint to the parameters of a model, by the transformers library's own rules.

A checkpoint may use other names than the current modules, or differ in the base model's prefix. It may also hold one
parameter in several tensors, such as one for each expert. This file applies the library's rules to names, and to
shapes on the meta device, so that no weights need to be read.
"""

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedGroup:
    """Checkpoint tensors that are converted together into one or more parameters."""

    target: str  # the first parameter they make
    converter: Any  # the library's WeightConverter; it keeps the tensors given to it, so each use copies it
    sources: tuple[tuple[str, str], ...]  # (the converter's pattern that matched, checkpoint name), in order

    def convert(self, tensors: dict[str, Any], model: Any) -> dict[str, Any]:
        """Converts checkpoint tensors, by name, into parameters by name. Empties `tensors`."""
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, tensors.pop(name))
        converted = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMatch:
    """A checkpoint's tensor names, matched with a model's parameters."""

    direct: dict[str, list[str]]  # parameter: checkpoint tensors that hold it unchanged; more than one is an error
    groups: tuple[ConvertedGroup, ...]
    unused: tuple[str, ...]  # checkpoint names without a parameter, except those that the library ignores


class NameRules:
    """Applies the library's naming rules for one model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._params = model.state_dict()  # names of parameters, tied ones under each of their names
        self._buffers = {name for name, _ in model.named_buffers()}
        mapping = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        self._converter_of = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]

    def match(self, names: Iterable[str]) -> NameMatch:
        """Matches a checkpoint's tensor names with the model's parameters."""
        direct: dict[str, list[str]] = {}
        grouped: dict[str, list[tuple[str, str]]] = {}
        unused = []
        # The converters expect their sources, such as experts, in this order.
        for name in sorted(names, key=dot_natural_key):
            target, pattern = self._rename(name)
            if target not in self._params:
                if not self._is_ignored(name, target):
                    unused.append(name)
            elif pattern is None:
                direct.setdefault(target, []).append(name)
            else:
                grouped.setdefault(target, []).append((pattern, name))
        groups = tuple(
            ConvertedGroup(target=target, converter=self._converter_of[sources[0][0]], sources=tuple(sources))
            for target, sources in grouped.items()
        )
        return NameMatch(direct=direct, groups=groups, unused=tuple(unused))

    def loads_as_itself(self, name: str) -> bool:
        """Checks whether a checkpoint tensor with a parameter's own name becomes that parameter unchanged."""
        return self._rename(name) == (name, None)

    def _rename(self, name: str) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._params)
        if target not in self._params and name in self._params:
            target, pattern = rename_source_key(name, [], [], prefix, self._params)
        return target, pattern

    def _is_ignored(self, name: str, target: str) -> bool:
        """Checks for buffers that older versions saved, and for names that the architecture says to skip."""
        if target in self._buffers or name.endswith((".rotary_emb.inv_freq", ".position_ids")):
            return True
        return any(pattern.search(name) or pattern.search(target) for pattern in self._ignored)
