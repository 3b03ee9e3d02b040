"""The JSON Schema of the configuration file, including the tiers' own keys."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from kvstore.cli.common.config_keys import meanings, sections, tier_models
from kvstore.config.settings import Settings, TierSettings

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """Return the schema of the whole file.

    Tiers of the installed kinds are described key by key. For an external tier (a dotted kind),
    only the common keys are.
    """
    whole = Settings.model_json_schema()
    definitions: dict[str, Any] = whole["$defs"]
    for model in sections().values():
        _explain(definitions[model.__name__], model)
    common = definitions.pop(TierSettings.__name__)
    _explain(common, TierSettings)
    kinds = {kind: _tier(kind, model, common) for kind, model in tier_models().items()}
    names = {kind: f"tier-{kind}" for kind in kinds}
    definitions.update({names[kind]: tier for kind, tier in kinds.items()})
    definitions["tier-external"] = {
        **common,
        "title": "an external tier",
        "properties": {
            **common["properties"],
            "kind": {
                "type": "string",
                "pattern": r"\.",
                "description": "Dotted name of a module.",
            },
        },
    }
    choices = [*names.values(), "tier-external"]
    whole["properties"]["tiers"]["items"] = {
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in choices]
    }
    return {"$schema": DIALECT, **whole, "title": "kvstore's configuration"}


def _tier(kind: str, model: type[BaseModel], common: dict[str, Any]) -> dict[str, Any]:
    own = model.model_json_schema()
    assert "$defs" not in own, f"the config model of tier {kind} has nested models"
    _explain(own, model)
    properties = {**common["properties"], **own["properties"]}
    properties["kind"] = {**common["properties"]["kind"], "const": kind}
    return {
        "title": f"a tier of kind {kind}",
        "description": own.get("description", ""),
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": ["kind", *own.get("required", [])],
    }


def _explain(part: dict[str, Any], model: type[BaseModel]) -> None:
    """Add the docstrings of the model's fields to its schema."""
    for name, meaning in meanings(model).items():
        if name in part["properties"]:
            part["properties"][name]["description"] = meaning
