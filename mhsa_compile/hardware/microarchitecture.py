"""The name of a CPU's microarchitecture: zen5, sapphirerapids, neoverse-n1. What is tuned on one serves that one.

Marketing names do not tell: "AMD EPYC" is Zen 3, 4 and 5. Nor do features, of which a hypervisor hides some. So the
table goes by what a core says it is. One that is not listed is named by its numbers: that, too, is nobody else's name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from mhsa_compile.files.package_files import beside
from mhsa_compile.hardware.arm_cpu import Core


def of_x86(vendor: str, family: int, model: int, stepping: int) -> str:
    """The name of an x86 CPU, by CPUID's numbers.

    >>> of_x86("AuthenticAMD", 26, 2, 1), of_x86("GenuineIntel", 6, 0x55, 7), of_x86("GenuineIntel", 6, 0xFE, 0)
    ('zen5', 'cascadelake', 'genuineintel-6-254')
    """
    for row in _table()["x86"]:
        least, most = row.get("steppings", (0, 15))
        if (row["vendor"], row["family"]) == (vendor, family) and least <= stepping <= most:
            for name, models in row["names"].items():
                if any(first <= model <= last for first, last in models):
                    return str(name)
    return f"{vendor.lower()}-{family}-{model}"


def of_arm(cores: Iterable[Core]) -> str:
    """The name of an ARM CPU, all kinds of its cores; empty where there are none.

    >>> of_arm([Core(0x41, 0xD0C)]), of_arm([Core(0x41, 0xD08), Core(0x41, 0xD03)] * 2)
    ('neoverse-n1', 'cortex-a53+cortex-a72')
    """
    return "+".join(sorted({_name_of(core) for core in cores}))


def pages_in_turn(name: str) -> int:
    """How many pages of memory a core of this name is asked for lines of in turn: 1 where nobody measured it.

    >>> pages_in_turn("emeraldrapids"), pages_in_turn("zen4")
    (8, 1)
    """
    return int(_table()["pages_in_turn"].get(name, 1))


def names() -> list[str]:
    """All that the table has, in order."""
    of_x86 = (name for row in _table()["x86"] for name in row["names"])
    return sorted({*of_x86, *(name for parts in _table()["arm"].values() for name in parts)})


def _name_of(core: Core) -> str:
    parts = _table()["arm"].get(f"0x{core.implementer:02X}", {})
    names = (name for name, part in parts.items() if part == core.part)
    return str(next(names, f"0x{core.implementer:02x}-0x{core.part:03x}"))


@functools.cache
def _table() -> dict[str, Any]:
    import tomllib

    return tomllib.loads(beside(__file__, "microarchitectures.toml").read_text(encoding="utf-8"))
