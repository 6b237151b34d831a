"""The versions of a box and its head, which must be equal."""

import re
from importlib.metadata import version

from pydantic import BaseModel, ConfigDict


class Versions(BaseModel):
    """The versions that must be equal on all boxes of a service, because results depend on them."""

    model_config = ConfigDict(frozen=True)

    windlass: str
    torch: str
    ray: str

    @classmethod
    def here(cls) -> "Versions":
        """Returns the installed versions."""
        return cls(windlass=version("windlass"), torch=version("torch"), ray=version("ray"))

    def differences(self, head: "Versions") -> list[str]:
        """Describes each version that is not the head's. Of torch, the minor version counts."""
        mine, heads = self.model_dump(), head.model_dump()
        mine["torch"], heads["torch"] = _minor(self.torch), _minor(head.torch)
        return [f"{name} {mine[name]}, and the head has {heads[name]}" for name in mine if mine[name] != heads[name]]


def _minor(torch_version: str) -> str:
    found = re.match(r"[0-9]+\.[0-9]+", torch_version)
    return found[0] if found else torch_version
