"""Generate the JSON Schema of the messages' headers.

`$defs` has the messages of each side as `from_worker`, `from_publisher` and `from_observer`. A
schema cannot define how many payload frames follow, that the bytes are JSON, that no field appears
twice, and how an integer is written (not as `1.0`).
"""

import json
from collections.abc import Iterable
from typing import Any, Final

from . import description as d

PATH: Final = "docs/protocol/messages.schema.json"
WBP: Final = 1
SIDES: Final = ("worker", "publisher", "observer")

Schema = dict[str, Any]


def files(protocol: d.Protocol) -> dict[str, str]:
    """Return the text of the schema, by its path in the repository."""
    structs = (*protocol.messages.values(), *protocol.objects.values())
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "WBP/1: the header of a message",
        **_one_of(protocol.messages),
        "$defs": {
            **{struct.name: _struct(struct) for struct in structs},
            **{f"from_{side}": _one_of(m.name for m in protocol.sent_by(side)) for side in SIDES},
        },
    }
    return {PATH: json.dumps(schema, indent=1, ensure_ascii=False) + "\n"}


def _one_of(messages: Iterable[str]) -> Schema:
    return {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in messages]}


def _struct(struct: d.Struct) -> Schema:
    properties: Schema = {}
    required = [field.name for field in struct.fields if field.required]
    if isinstance(struct, d.Message):
        properties = {"wbp": {"const": WBP}, "type": {"const": struct.name}}
        required = ["wbp", "type", *required]
    properties |= {field.name: _field(field) for field in struct.fields}
    return {
        "description": d.plain(struct.summary),
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
    }


def _field(field: d.Field) -> Schema:
    schema = _type(field.type)
    schema |= {"description": d.plain(field.meaning)} if field.meaning else {}
    return schema if field.required else {**schema, "default": field.default}


def _type(kind: d.Type) -> Schema:
    match kind:
        case d.Integer():
            return {"type": "integer", "minimum": kind.least, "maximum": kind.most}
        case d.Boolean():
            return {"type": "boolean"}
        case d.Name():
            return _string(r"[A-Za-z0-9._-]{1,128}")
        case d.Hex():
            digits = rf"[0-9a-f]{{{kind.digits}}}"
            return _string(rf"({digits})?" if kind.empty else digits)
        case d.Text():
            return {"type": "string", "maxLength": kind.most}
        case d.Base64():
            return {
                **_string(r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"),
                "contentEncoding": "base64",
                "maxLength": (kind.most + 2) // 3 * 4,
            }
        case d.OneOf():
            return {"enum": [*kind.words]}
        case d.Object():
            return {"$ref": f"#/$defs/{kind.name}"}
        case d.Nullable():
            return {"anyOf": [_type(kind.inner), {"type": "null"}]}
        case d.Array():
            return {"type": "array", "maxItems": kind.most, "items": _type(kind.item)}
        case d.Map():
            return {
                "type": "object",
                "maxProperties": kind.most,
                "propertyNames": _type(kind.key),
                "additionalProperties": _type(kind.value),
            }


def _string(pattern: str) -> Schema:
    return {"type": "string", "pattern": f"^{pattern}$"}
