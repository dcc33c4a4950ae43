#!/usr/bin/env python3
"""Writes the package's preinst, which checks the configuration before an upgrade.

preinst runs before the files of the new version are unpacked, so it must contain that version's
rules itself. They are taken from the program: load_settings() and everything that it uses. Nothing
is written twice, so preinst and the program cannot disagree.
"""

from __future__ import annotations
import __future__

import ast
import dis
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

TOP = Path(__file__).resolve().parent.parent
TEMPLATE = TOP / "packaging/deb/preinst"
MARK = "#RULES#\n"
# What preinst calls. ConfigError has the reason, on one line.
ENTRY = ("load_settings", "ConfigError")
# The modules that preinst can import: those of Python (tomllib since 3.11), and tomli.
MODULES = sys.stdlib_module_names | {"tomllib", "tomli"}
# Annotations are not evaluated, so what only they name is not needed.
ANNOTATIONS = __future__.annotations.compiler_flag


def main() -> int:
    """Print preinst."""
    print(preinst((TOP / "ttdp.py").read_text()), end="")
    return 0


def preinst(program: str) -> str:
    """Return the script for a program's text."""
    head, mark, tail = TEMPLATE.read_text().partition(MARK)
    assert mark, f"{TEMPLATE} has no line {MARK!r}"
    return head + rules(program) + tail


def rules(program: str) -> str:
    """Return the definitions and imports of load_settings(), in the program's order.

    Exits if one of them is not a module of Python: preinst must run without the package's files.
    """
    statements = ast.parse(program).body
    defined = {name: statement for statement in statements for name in names_bound(statement)}
    if missing := [name for name in ENTRY if name not in defined]:
        sys.exit(f"preinst: ttdp.py does not define {', '.join(missing)}")
    needed: set[ast.stmt] = set()
    names = [*ENTRY]
    while names:
        statement = defined.get(names.pop())
        if statement is None or statement in needed:
            continue
        needed.add(statement)
        module = ast.Module([statement], type_ignores=[])
        names += names_used(compile(module, "ttdp.py", "exec", ANNOTATIONS, dont_inherit=True))
    lines = program.splitlines()
    kept = [statement for statement in statements if statement in needed]
    for statement in kept:
        refuse_other_modules(statement)
    return "".join(f"{text_of(statement, lines)}\n\n" for statement in kept)


def names_bound(statement: ast.stmt) -> list[str]:
    """Return the names that a statement at the top level defines or imports."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    found = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
        elif isinstance(node, ast.alias):
            found.append(node.asname or node.name.partition(".")[0])
    return found


def names_used(code: CodeType) -> Iterator[str]:
    """Yield the global names that compiled code reads; local variables are not among them."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_used(constant)


def refuse_other_modules(statement: ast.stmt) -> None:
    """Exit if a statement imports a module that is not Python's."""
    for node in ast.walk(statement):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            if module.partition(".")[0] not in MODULES:
                sys.exit(f"preinst: the configuration's rules in ttdp.py need {module}")


def text_of(statement: ast.stmt, lines: list[str]) -> str:
    """Return a statement's lines, with its decorators and the comment above it."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(each.lineno for each in decorators)]) - 1
    while first and lines[first - 1].startswith("#") and not lines[first - 1].startswith("# =="):
        first -= 1
    return "\n".join(lines[first : statement.end_lineno])


if __name__ == "__main__":
    sys.exit(main())
