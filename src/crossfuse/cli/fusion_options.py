"""Any field of a fusion as an option: `--fusion text-anchors --threshold 0.12 --copy-order prompt`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from crossfuse.fusion import Fusion

_KEY = "crossfuse.fusion_fields"


class FusionCommand(TyperCommand):
    """A command that takes options which it does not declare as fields of the fusion named by `--fusion`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = dict.fromkeys(ctx.help_option_names, False)
        for parameter in self.params:
            for name in (*parameter.opts, *parameter.secondary_opts):
                takes_value[name] = not getattr(parameter, "is_flag", False)
        ctx.meta[_KEY], rest = _split(args, takes_value)
        result: list[str] = super().parse_args(ctx, rest)
        return result


def chosen_fusion(context: typer.Context, name: str | None) -> Fusion | None:
    """The fusion that the command line asks for; None where it names none.

    Raises:
        ValueError: unknown fusion or field (the nearest name is suggested), or a value of the wrong kind.
    """
    fields: dict[str, Any] = context.meta.get(_KEY, {})
    if name is None:
        if fields:
            option = next(iter(fields))
            raise ValueError(f"unknown option --{option.replace('_', '-')}; fields of a fusion need --fusion NAME")
        return None
    from crossfuse import make_fusion

    return make_fusion(name, **fields)


def _split(args: list[str], takes_value: dict[str, bool]) -> tuple[dict[str, Any], list[str]]:
    """Take undeclared options out: `--field value`, `--field=value`, `--flag`, `--no-flag`."""
    unknown = [a for a in args[: _end(args)] if a.startswith("--") and a.partition("=")[0] not in takes_value]
    kinds = _field_kinds(args) if unknown else {}
    fields: dict[str, Any] = {}
    rest: list[str] = []
    queue = list(args)
    while queue:
        argument = queue.pop(0)
        option, has_value, value = argument.partition("=")
        if argument == "--":
            rest += [argument, *queue]
            break
        if not option.startswith("--") or option in takes_value:
            rest.append(argument)
            if takes_value.get(option) and not has_value and queue:
                rest.append(queue.pop(0))
            continue
        field = option[2:].replace("-", "_")
        negated = field.removeprefix("no_")
        if not has_value and kinds.get(field) == "bool":
            fields[field] = True
        elif not has_value and negated != field and kinds.get(negated) == "bool":
            fields[negated] = False
        else:
            if not has_value:
                if not queue:
                    raise ValueError(f"{option} needs a value")
                value = queue.pop(0)
            fields[field] = _parse(option, value, kinds.get(field, "str"))
    return fields, rest


def _end(args: list[str]) -> int:
    return args.index("--") if "--" in args else len(args)


def _field_kinds(args: list[str]) -> dict[str, str]:
    """Field -> its type as its dataclass writes it; empty where `--fusion` names no known fusion."""
    name = None
    for argument, following in zip(args, [*args[1:], ""], strict=True):
        if argument == "--fusion":
            name = following
        elif argument.startswith("--fusion="):
            name = argument.partition("=")[2]
    if name is None:
        return {}
    from crossfuse import FUSIONS
    from crossfuse.fusion import fusion_class

    return {f.name: str(f.type) for f in dataclasses.fields(fusion_class(name))} if name in FUSIONS else {}


def _parse(option: str, value: str, kind: str) -> Any:
    if value.lower() == "none" and "None" in kind:
        return None
    try:
        if "bool" in kind:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[value.lower()]
        if "tuple" in kind:
            return tuple(int(part) for part in value.split(",") if part.strip())
        if "TextAnchors" in kind:
            return {"name": "text-anchors", "threshold": float(value)}
        if "Compression" in kind:
            from crossfuse.compress import parse_compression

            return parse_compression(value)
        if "int" in kind and "float" not in kind:
            return int(value)
        if "float" in kind:
            return float(value)
    except (ValueError, KeyError):
        raise ValueError(f"{option} takes {_wanted(kind)}; got {value!r}") from None
    return value


def _wanted(kind: str) -> str:
    if "bool" in kind:
        return "true or false"
    if "tuple" in kind:
        return "whole numbers with commas between them"
    if "Compression" in kind:
        return "a compression and its size, as mean-pool:4 or q-former:32"
    return "a whole number" if "int" in kind and "float" not in kind else "a number"
