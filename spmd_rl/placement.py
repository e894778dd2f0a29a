"""Which ranks each role lives on: the placement as written in the configuration, and what is wrong with it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import gcd

from spmd_rl.config import ROLES, Config

Ranks = tuple[int, ...]
DEALT = ("actor", "critic", "ref", "rollout")  # the order in which shares and counts get their ranks
SPELLINGS = "'all', a range '0-3', a list '0,2', a share '1/2', a count '4ranks' or a role's name"


def needed_roles(config: Config) -> list[str]:
    """actor and rollout always; ref where a KL term asks for it; critic where advantages need values."""
    needs = {"ref": config.algorithm.kl_coef != 0, "critic": config.algorithm.advantage == "gae"}
    return [role for role in ROLES if needs.get(role, True)]


def compact(ranks: Iterable[int]) -> str:
    """`0-3,8` for the ranks 0, 1, 2, 3 and 8, in ascending order; `none` for no ranks."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank <= runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"


def parse_ranks(spec: str, world_size: int) -> Ranks:
    """`all`, `0-3`, `0,2,5` or mixtures `0-2,6`, as ascending ranks. Raises ValueError."""
    if spec == "all":
        return tuple(range(world_size))
    ranks: list[int] = []
    for part in str(spec).split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError(f"'{spec}' is no set of ranks - set {SPELLINGS}")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(sorted(ranks))


def parse_count(spec: str, world_size: int) -> int | None:
    """How many ranks `1/2` (that share of the world) or `4ranks` asks for; None where it is neither. Raises ValueError."""
    if found := re.fullmatch(r"(\d+) *ranks?", spec):
        return int(found[1])
    if not (found := re.fullmatch(r"(\d+)/(\d+)", spec)):
        return None
    part, whole = int(found[1]), int(found[2])
    if not 0 < part <= whole:
        raise ValueError(f"'{spec}' is no share of the world - set a fraction above 0 and at most 1, such as '1/2'")
    if part * world_size % whole:
        ranks = "1 rank is" if world_size == 1 else f"{world_size} ranks is"
        raise ValueError(
            f"'{spec}' of {ranks} no whole number of ranks - start a multiple of {whole // gcd(part, whole)} ranks, "
            f"set a count such as '1ranks', or placement=colocated"
        )
    return part * world_size // whole


def pick_ranks(count: int, free: list[int], local_world_size: int) -> Ranks:
    """`count` of the free ranks: the first whole nodes, else the fullest node with room for all, else just the first ranks.

    `free`: ascending, at least `count`. A node is `local_world_size` ranks."""
    nodes: dict[int, list[int]] = {}
    for rank in free:
        nodes.setdefault(rank // local_world_size, []).append(rank)
    whole = [rank for ranks in nodes.values() if len(ranks) == local_world_size for rank in ranks]
    if count % local_world_size == 0 and len(whole) >= count:
        return tuple(whole[:count])
    with_room = [ranks for ranks in nodes.values() if len(ranks) >= count]
    return tuple(min(with_room, key=len, default=free)[:count])


def parse_placement(config: Config, world_size: int, local_world_size: int | None = None) -> tuple[dict[str, Ranks], list[str]]:
    """World ranks of every needed role, and what is wrong with `placement`.

    `local_world_size`: ranks of a node; None: the world is one node. Shares and counts are dealt from the ranks that no role
    names, in the order actor, critic, ref, rollout, as whole nodes or inside one node where that is possible."""
    owners, problems = _owners(config)
    named: dict[str, Ranks] = {}
    counts: dict[str, int] = {}
    for owner in dict.fromkeys(owners.values()):
        spec = str(vars(config.placement)[owner])
        try:
            if (count := parse_count(spec, world_size)) is None:
                named[owner] = parse_ranks(spec, world_size)
            else:
                counts[owner] = count
        except ValueError as error:
            problems.append(f"placement.{owner}: {error}")
    if not problems:
        problems += _deal(counts, named, world_size, local_world_size or world_size, config)
    placement = {role: named[owner] for role, owner in owners.items() if owner in named}
    return placement, problems or placement_problems(placement, world_size, local_world_size)


def _owners(config: Config) -> tuple[dict[str, str], list[str]]:
    """The role whose spelling each needed role follows (often itself), and which roles only follow each other."""
    owners, problems = {}, []
    for role in needed_roles(config):
        seen = [role]
        while (spec := vars(config.placement)[seen[-1]]) in ROLES and spec not in seen:
            seen.append(spec)
        if spec in ROLES:
            chain = " -> ".join([*seen, spec])
            problems.append(f"placement.{role}: {chain} names no ranks - set 'all', '0-3', '1/2' or '4ranks' for one of them")
        else:
            owners[role] = seen[-1]
    return owners, problems


def _deal(counts: dict[str, int], named: dict[str, Ranks], world_size: int, local: int, config: Config) -> list[str]:
    """Adds the ranks of the counts to `named`; what cannot be dealt."""
    free = sorted({*range(world_size)} - {rank for ranks in named.values() for rank in ranks})
    for role in (role for role in DEALT if role in counts):
        if counts[role] > len(free):
            return [
                f"placement.{role}: '{vars(config.placement)[role]}' is {counts[role]} ranks, but {len(free)} of {world_size} "
                f"are left ({compact(free)}) - ask for less, or start more"
            ]
        named[role] = pick_ranks(counts[role], free, local)
        free = sorted({*free} - {*named[role]})
    return []


def placement_problems(placement: dict[str, Ranks], world_size: int, local_world_size: int | None = None) -> list[str]:
    """Every rank has a role; two roles share all of their ranks or none; ranks exist and are named once; where there are
    several cells, each lies inside one node or is whole nodes. `local_world_size`: as for `parse_placement`."""
    problems = []
    for role, ranks in placement.items():
        if outside := [r for r in ranks if r >= world_size]:
            problems.append(
                f"placement.{role}: ranks {compact(outside)} do not exist ({world_size} ranks) - set ranks below {world_size}"
            )
        if len(set(ranks)) < len(ranks) or not ranks:
            shown = ",".join(map(str, ranks)) or "none"
            problems.append(f"placement.{role}: {shown} is empty or names a rank twice - name each rank once")
    names = list(placement)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            a, b = set(placement[one]), set(placement[other])
            if a != b and a & b:
                problems.append(
                    f"placement.{one}, placement.{other}: ranks {compact(a)} and {compact(b)} share ranks {compact(a & b)} "
                    f"but not all - give both the same ranks, or none in common"
                )
    if idle := set(range(world_size)) - {r for ranks in placement.values() for r in ranks}:
        problems.append(f"placement: ranks {compact(idle)} have no role ({world_size} ranks) - give each a role, or start fewer")
    return problems or _node_problems(placement, world_size, local_world_size or world_size)


def _node_problems(placement: dict[str, Ranks], world_size: int, local: int) -> list[str]:
    """Which cells of a valid placement cross nodes, each with the ranks of the nodes that it cuts."""
    cells: dict[Ranks, list[str]] = {}
    for role, ranks in placement.items():
        cells.setdefault(tuple(sorted(ranks)), []).append(f"placement.{role}")
    if len(cells) == 1:
        return []
    if world_size % local:
        return [
            f"placement: {len(cells)} cells need as many ranks on every node ({world_size} ranks, {local} on this node) - "
            f"start as many on each, or set placement=colocated"
        ]
    problems = []
    for ranks, fields in cells.items():
        nodes = sorted({rank // local for rank in ranks})
        if len(nodes) > 1 and len(nodes) * local > len(ranks):
            spans = ", ".join(f"{node * local}-{node * local + local - 1}" for node in nodes if _cuts(ranks, node, local))
            problems.append(
                f"{', '.join(fields)}: ranks {compact(ranks)} cut the nodes of ranks {spans} and lie on {len(nodes)} nodes - "
                f"set ranks inside one node of {local}, or whole nodes"
            )
    return problems


def _cuts(ranks: Ranks, node: int, local: int) -> bool:
    return 0 < len({*ranks} & {*range(node * local, node * local + local)}) < local


def tensor_parallel_problems(ranks: Ranks, width: int, local_world_size: int) -> list[str]:
    """Which tensor-parallel groups of the rollout cross nodes; `width`: ranks of a group, a divisor of their number."""
    groups = (ranks[i : i + width] for i in range(0, len(ranks), width))
    crossing = next((group for group in groups if len({rank // local_world_size for rank in group}) > 1), None)
    if crossing is None:
        return []
    nodes = sorted({rank // local_world_size for rank in crossing})
    spans = ", ".join(f"{node * local_world_size}-{(node + 1) * local_world_size - 1}" for node in nodes)
    return [
        f"rollout.tensor_parallel_size: the group of ranks {compact(crossing)} crosses the nodes of ranks {spans} "
        f"({width} ranks a group) - set a divisor of {local_world_size}, the ranks of a node"
    ]
