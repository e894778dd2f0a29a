"""The design's rules as tests: each checker maps {module name: source} to what breaks its rule."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "spmd_rl"
Sources = dict[str, str]

LAYERS = [  # low to high: a module imports only from lower rows
    "config",
    "placement",
    "engines",
    "models launch metrics validation workers",
    "fallback",
    "mesh",
    "collectives batch kl",
    "placed data rewards environments advantages losses",
    "scoring",
    "engine",
    "roles",
    "checkpoint",
    "trainer sft",
    "train report",
]
LAYER = {name: i for i, row in enumerate(LAYERS) for name in row.split()}
WITH_SIBLINGS = {"engine", "roles"}  # packages whose files may import each other
DISTRIBUTED = {"mesh", "fallback", "collectives", "placed", "checkpoint", "engine", "roles.vllm_rollout"}
BACKENDS = {  # package -> the only module, or package of ours, that imports it
    "vllm": "roles.vllm_rollout",
    "megatron": "engine.megatron",
    "torchtitan": "engine.torchtitan",
    "veomni": "engine.veomni",
    "peft": "engine.lora",
    "wandb": "metrics",
}
TORCH_FREE = [
    "config",
    "placement",
    "engines",
    "validation",
    "launch",
    "workers",
    "rewards",
    "environments",
    "models",
    "engine.registry",
]
TRAINERS = {"trainer", "sft"}
LOCAL = {"rank", "here", "local", "lane", "replica"}
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier",
    "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
}  # fmt: skip
COLLECT = {"collectives", "engine"}
WORLD = {("mesh", "barrier"), ("mesh", "all_reduce")}  # a world's first and last calls: below collectives
MAX_FILE, MAX_FUNCTION = 400, 60


def read_sources() -> Sources:
    """The package's files by module name without `spmd_rl.`; a package's own file is the package's name."""
    found = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def within(module: str, allowed: set[str]) -> bool:
    """Whether a module is one of these, or inside one of them."""
    return any(module == name or module.startswith(name + ".") for name in allowed)


def imports(source: str, functions: bool = True) -> Iterator[tuple[str, str, int]]:
    """(what is imported as a dotted name, the name it is bound to, line), also inside functions or only outside."""
    todo: list[ast.AST] = [ast.parse(source)]
    for node in todo:
        if isinstance(node, ast.Import):
            yield from ((a.name, a.asname or a.name.partition(".")[0], node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from ((f"{node.module}.{a.name}", a.asname or a.name, node.lineno) for a in node.names)
        if functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += ast.iter_child_nodes(node)


def our_imports(sources: Sources, module: str) -> Iterator[tuple[str, int]]:
    """(module of ours that `module` imports, line)."""
    for name, _, line in imports(sources[module]):
        if within(name, {PACKAGE}):
            inside = name.removeprefix(PACKAGE).lstrip(".")
            yield (inside if inside in sources else inside.rpartition(".")[0]), line


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a chain of attributes, '' for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{base}.{node.attr}" if isinstance(node, ast.Attribute) and (base := dotted(node.value)) else ""


def uses(source: str) -> Iterator[tuple[str, int]]:
    """(full dotted name, line) of every attribute chain and imported name, aliases undone."""
    bound = {}
    for name, alias, line in imports(source):
        bound[alias] = alias if alias == name.partition(".")[0] else name
        yield name, line
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            first, _, rest = name.partition(".")
            yield f"{bound.get(first, first)}.{rest}", node.lineno


def layers(sources: Sources) -> list[str]:
    found = []
    for module in sources:
        top = module.partition(".")[0]
        if top and top not in LAYER:
            found.append(f"{module}: has no layer - give it one in LAYERS")
        for other, line in our_imports(sources, module):
            theirs = other.partition(".")[0]
            sibling = theirs == top and top in WITH_SIBLINGS
            if theirs and not sibling and LAYER.get(theirs, len(LAYERS)) >= LAYER.get(top, 0):
                found.append(f"{module}:{line}: imports {other}, which is no lower layer")
    return found


def cycles(sources: Sources) -> list[str]:
    graph = {module: {other for other, _ in our_imports(sources, module)} & sources.keys() for module in sources}
    found, done = [], set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for other in sorted(graph[module]):
                visit(other, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def distributed(sources: Sources) -> list[str]:
    return [
        f"{module}:{line}: uses {name}"
        for module, source in sources.items()
        if not within(module, DISTRIBUTED)
        for name, line in uses(source)
        if within(name, {"torch.distributed"})
    ]


def backends(sources: Sources) -> list[str]:
    return [
        f"{module}:{line}: imports {package} when it is imported"
        for module, source in sources.items()
        for name, _, line in imports(source, functions=False)
        if (package := name.partition(".")[0]) in BACKENDS and not within(module, {BACKENDS[package]})
    ]


def trainer_grammar(sources: Sources) -> list[str]:
    found = []
    for module in sources.keys() & TRAINERS:
        for node in ast.walk(ast.parse(sources[module])):
            decides = []
            if isinstance(node, ast.If | ast.While | ast.IfExp):
                decides = [node.test]
            elif isinstance(node, ast.For):
                decides = [node.iter]
            elif isinstance(node, ast.comprehension):
                decides = [node.iter, *node.ifs]
            elif isinstance(node, ast.Match):
                decides = [node.subject, *(case.guard for case in node.cases if case.guard)]
            for part in (p for d in decides for p in ast.walk(d)):
                name = part.id if isinstance(part, ast.Name) else part.attr if isinstance(part, ast.Attribute) else ""
                if name in LOCAL or name == "item":
                    found.append(f"{module}:{part.lineno}: '{ast.unparse(part)}' decides control flow: it may differ between ranks")
    return found


def sizes(sources: Sources) -> list[str]:
    found = []
    for module, source in sources.items():
        if (lines := len(source.splitlines())) > MAX_FILE:
            found.append(f"{module}: {lines} lines, at most {MAX_FILE}")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (n := node.end_lineno - node.lineno + 1) > MAX_FUNCTION:
                found.append(f"{module}:{node.lineno}: {node.name} has {n} lines, at most {MAX_FUNCTION}")
    return found


def guessing(sources: Sources) -> list[str]:
    return [
        f"{module}:{node.lineno}: {node.id}"
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name) and node.id in ("hasattr", "getattr")
    ]


def collectives(sources: Sources) -> list[str]:
    found = []
    for module, source in sources.items():
        for name, line in uses(source):
            last = name.rpartition(".")[2] if within(name, {"torch.distributed"}) else ""
            if last == "new_group" and module != "mesh":
                found.append(f"{module}:{line}: new_group belongs in mesh.py")
            if last in COLLECTIVES and not within(module, COLLECT) and (module, last) not in WORLD:
                found.append(f"{module}:{line}: {last} belongs in collectives.py")
    return found


CHECKERS = [layers, cycles, distributed, backends, trainer_grammar, sizes, guessing, collectives]


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda c: c.__name__)
def test_the_package_keeps_the_rule(checker):
    assert checker(read_sources()) == []


def test_every_file_is_checked():
    sources = read_sources()
    assert {"", "config", "engine", "engine.fsdp", "trainer", "train"} <= sources.keys()
    for row in LAYERS:
        assert any(within(module, set(row.split())) for module in sources), row


def test_light_modules_import_no_torch():
    """One process for all of them: `validate` and the launchers must answer before the seconds that torch takes."""
    modules = ", ".join(f"{PACKAGE}.{name}" for name in TORCH_FREE)
    code = f"import sys, {modules}; sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * MAX_FUNCTION
BAD = [
    (layers, {"config": "import spmd_rl.trainer", "trainer": ""}, "config:1: imports trainer"),
    (layers, {"losses": "def f():\n    from spmd_rl.rewards import x", "rewards": ""}, "losses:2: imports rewards"),
    (layers, {"engine.base": "from spmd_rl.roles import hf_rollout", "roles.hf_rollout": ""}, "imports roles.hf_rollout"),
    (layers, {"data": "from spmd_rl.engine import hf_names", "engine": "", "engine.hf_names": ""}, "imports engine.hf_names"),
    (layers, {"": "from spmd_rl.config import Config", "config": ""}, "imports config"),
    (layers, {"helpers": ""}, "helpers: has no layer"),
    (layers, {"train": "from spmd_rl.helpers import x", "helpers": ""}, "train:1: imports helpers"),
    (cycles, {"engine.a": "import spmd_rl.engine.b", "engine.b": "from spmd_rl.engine import a"}, "engine.a -> engine.b -> "),
    (cycles, {"a": "import spmd_rl.b", "b": "import spmd_rl.c", "c": "def f():\n    import spmd_rl.a"}, "a -> b -> c -> a"),
    (distributed, {"trainer": "import torch.distributed as dist"}, "trainer:1: uses torch.distributed"),
    (distributed, {"trainer": "from torch import distributed"}, "trainer:1"),
    (distributed, {"roles.hf_rollout": "def f():\n    from torch.distributed import all_reduce"}, "roles.hf_rollout:2"),
    (distributed, {"losses": "import torch\nx = torch.distributed.get_rank()"}, "losses:2: uses torch.distributed.get_rank"),
    (backends, {"roles.server_adapter": "import vllm"}, "roles.server_adapter:1: imports vllm"),
    (backends, {"engine.fsdp": "try:\n    import megatron.core\nfinally:\n    pass"}, "engine.fsdp:2: imports megatron"),
    (backends, {"train": "class A:\n    import wandb"}, "train:2: imports wandb"),
    (trainer_grammar, {"trainer": "if self.world.rank == 0:\n    save()"}, "trainer:1: 'self.world.rank'"),
    (trainer_grammar, {"trainer": "while x.local is None: pass"}, "'x.local'"),
    (trainer_grammar, {"trainer": "y = 1 if mesh.here else 2"}, "'mesh.here'"),
    (trainer_grammar, {"trainer": "y = [a for a in b if a.lane]"}, "'a.lane'"),
    (trainer_grammar, {"trainer": "y = {a for a in range(replica)}"}, "'replica'"),
    (trainer_grammar, {"trainer": "for a in batch.local: pass"}, "'batch.local'"),
    (trainer_grammar, {"sft": "if loss.item() > 3: pass"}, "sft:1: 'loss.item'"),
    (trainer_grammar, {"trainer": "match world.rank:\n    case 0: pass"}, "'world.rank'"),
    (trainer_grammar, {"trainer": "if a and not (b or f(rank)): pass"}, "'rank'"),
    (sizes, {"data": "x = 1\n" * (MAX_FILE + 1)}, "data: 401 lines"),
    (sizes, {"data": LONG_FUNCTION}, "data:1: f has 61 lines"),
    (sizes, {"data": "class A:\n    async " + LONG_FUNCTION.replace("\n", "\n    ").rstrip()}, "data:2: f has 61 lines"),
    (guessing, {"data": "x = hasattr(y, 'z')"}, "data:1: hasattr"),
    (guessing, {"data": "def f(y):\n    return map(getattr, y)"}, "data:2: getattr"),
    (collectives, {"engine.fsdp": "import torch.distributed as dist\ndist.new_group([0])"}, "engine.fsdp:2: new_group"),
    (collectives, {"collectives": "from torch.distributed import new_group"}, "collectives:1: new_group"),
    (collectives, {"placed": "import torch.distributed as dist\ndist.all_reduce(x)"}, "placed:2: all_reduce"),
    (collectives, {"placed": "from torch.distributed import broadcast as b"}, "placed:1: broadcast"),
    (collectives, {"checkpoint": "import torch\ntorch.distributed.barrier()"}, "checkpoint:2: barrier"),
    (collectives, {"mesh": "from torch.distributed import distributed_c10d as c\nc.all_gather(x, y)"}, "mesh:2: all_gather"),
]  # fmt: skip
GOOD = [
    (layers, {"trainer": "import torch\nfrom spmd_rl.config import Config\nfrom spmd_rl.engine import base", "config": "",
              "engine": "", "engine.base": "from spmd_rl.engine.packing import pack", "engine.packing": ""}),
    (layers, {"engine.megatron.engine": "from spmd_rl.engine.megatron.pipeline import x", "engine.megatron.pipeline": ""}),
    (cycles, {"a": "import spmd_rl.b, spmd_rl.c", "b": "import spmd_rl.c", "c": ""}),
    (distributed, {"mesh": "import torch.distributed", "engine.megatron.engine": "import torch.distributed as dist",
                   "data": "import torch\ny.distributed.z()", "roles.vllm_rollout": "from torch import distributed"}),
    (backends, {"engine.megatron.engine": "from megatron.core import x", "metrics": "import wandb",
                "train": "def f():\n    import vllm", "data": "import vllm_like"}),
    (trainer_grammar, {"trainer": "if step and agree(self.stopping, self.world.control, 'stop'):\n    x = self.world.rank\n"
                                  "for row in rows:\n    y = row.local", "train": "if launch.rank: pass"}),
    (sizes, {"data": "x = 1\n" * MAX_FILE, "losses": LONG_FUNCTION.replace("    x = 1\n", "", 1)}),
    (guessing, {"data": "# getattr(x)\nx = 'hasattr('"}),
    (collectives, {"mesh": "import torch.distributed as dist\ndist.new_group([0])\ndist.barrier()", "checkpoint":
                   "import torch.distributed as dist\nfrom spmd_rl.collectives import barrier\nbarrier(g)\ndist.get_rank()",
                   "engine.fsdp": "import torch.distributed as dist\ndist.all_reduce(x)", "data": "pool.send(x); a.gather(1, b)"}),
]  # fmt: skip


@pytest.mark.parametrize(("checker", "sources", "message"), BAD, ids=[f"{c.__name__}-{m}" for c, _, m in BAD])
def test_a_breach_is_found(checker, sources, message):
    found = checker(sources)
    assert any(message in line for line in found), found


@pytest.mark.parametrize(("checker", "sources"), GOOD, ids=[f"{c.__name__}-{i}" for i, (c, _) in enumerate(GOOD)])
def test_what_the_rule_allows_passes(checker, sources):
    assert checker(sources) == []


def test_every_checker_is_shown_to_fail():
    assert {checker for checker, *_ in BAD} == set(CHECKERS) == {checker for checker, _ in GOOD}
