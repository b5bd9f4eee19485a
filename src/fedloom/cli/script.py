"""Experiments from training scripts (``fedloom new --from``). A script is parsed, and never imported or run."""

from __future__ import annotations

import ast
import builtins
import functools
import operator
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from fedloom.core.files import read_file
from fedloom.errors import ExperimentError
from fedloom.experiment.yaml_reader import as_yaml, as_yaml_document

UNKNOWN = object()  # value of an expression that is not constant
MODULES = {"Module", "LightningModule", "PreTrainedModel"}
MOVES = {"to", "cuda", "cpu", "float", "train", "eval"}  # methods of a module that return it
DATASETS = {"fashionmnist": "fashion-mnist", "mnist": "mnist", "cifar10": "cifar10", "cifar100": "cifar100"}
LOCAL, ROUNDS, TASK = "algorithm.local.", "federation.rounds", "data.source.task"
SIGNATURES = {
    "SGD": "_ lr momentum _ weight_decay nesterov", "Adam": "_ lr betas eps weight_decay",
    "AdamW": "_ lr betas eps weight_decay", "DataLoader": "_ batch_size", "clip_grad_norm_": "_ max_norm",
    "Trainer": "",
}  # fmt: skip
"""Positional parameters of functions whose arguments are taken over."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": "sgd", "lr": 1e-3}, "Adam": {"optimizer": "adam", "lr": 1e-3},
    "AdamW": {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.01},
    "TrainingArguments": {"optimizer": "adamw", "lr": 5e-5, "batch_size": 8, ROUNDS: 3, "clip": 1.0},
    "MSELoss": {TASK: "regression"}, "mse_loss": {TASK: "regression"},
}  # fmt: skip
"""Meaning of a call whose arguments do not say otherwise."""

NAMES = {name: name for name in ("lr", "momentum", "weight_decay", "nesterov", "betas", "eps", "batch_size")} | {
    "learning_rate": "lr", "per_device_train_batch_size": "batch_size", "num_train_epochs": ROUNDS,
    "max_epochs": ROUNDS, "max_norm": "clip", "max_grad_norm": "clip", "gradient_clip_val": "clip",
    "gradient_accumulation_steps": "accumulate", "accumulate_grad_batches": "accumulate",
}  # fmt: skip
"""Keys by arguments; those of ``algorithm.local`` by their last names."""

ADVICE = {
    r"RMSprop|Ada(grad|delta|max)|NAdam|RAdam|LBFGS": "choose algorithm.local.optimizer: sgd, adam or adamw",
    r"\w+LR|ReduceLROnPlateau|get_\w*schedule\w*": "choose algorithm.local.schedule, which counts rounds",
    r"Random\w+|ColorJitter|AutoAugment": "name it in data.augment if it changes training images",
    r"(?!CrossEntropy|NLL|BCE|MSE)\w+Loss": "choose task, or give the module a method loss(outputs, y)",
    r"\w+Partitioner": "choose data.partition",
}
"""Advice about a call that is not taken over, by a pattern of the function's name."""

README = """# {script} as an experiment

`network.py` has the module, `experiment.yaml` the rest. First do what is left. Then compare FedAvg, whose model each
client fine-tunes, with training alone:

```sh
export PYTHONPATH=.
{fetch}fedloom check experiment.yaml
fedloom run experiment.yaml --out runs/fedavg
fedloom run experiment.yaml --out runs/local --set federation.rounds=0 --set 'algorithm={alone}'
fedloom compare runs/fedavg runs/local
```

**Left to do**

{left}

A script writes `data.npz`, if it is needed, from its data set before any transform; images are uint8
`[n, channels, height, width]`: `x, y = zip(*dataset); numpy.savez("data.npz", x=numpy.stack(x), y=numpy.stack(y))`.
Another array, such as `owner=`, can name each example's client.

**Taken over**

{taken}
"""
Line = tuple[str, str, str]  # place in the script, text there, and what it became or what to do


class Script:
    """Parsed file of a script, and the files beside it from which it imports."""

    def __init__(self, path: Path) -> None:
        self.statements: dict[ast.stmt, tuple[Path, str]] = {}  # of the files, with path and text
        paths = [path.absolute()]
        for path in paths:
            try:
                text = decode_source(read_file(path))
                body = ast.parse(text).body
            except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
                line = f", line {error.lineno}," if isinstance(error, SyntaxError) and error.lineno else ""
                reason = getattr(error, "strerror", None) or getattr(error, "msg", None) or str(error)
                message = f"{path}{line} cannot be read as Python: {reason.lower()}"
                raise ExperimentError(message, key="from", found=str(path)) from None
            self.statements |= dict.fromkeys(body, (path, text))
            for imported in (each for each in body if isinstance(each, ast.ImportFrom)):
                folders = path.parents[imported.level - 1 : imported.level] if imported.level else path.parents[:2]
                files = [each / f"{(imported.module or '').replace('.', '/')}.py" for each in folders]
                paths += [each for each in files if each.is_file() and each not in paths][:1]
        self.places: dict[ast.AST, str] = {}  # file and line of each node
        self.values: dict[str, list[ast.expr]] = defaultdict(list)  # what each name is set to, in any scope
        for statement, (path, _) in self.statements.items():
            file = re.sub(r"[^\w.-]", "_", path.name)
            for node in ast.walk(statement):
                self.places[node] = f"{file}:{getattr(node, 'lineno', statement.lineno)}"
                for name, value in _set(node):
                    self.values[name].append(value)

    def calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions with these last names, in their order in the files."""
        found = [node for node in self.places if isinstance(node, ast.Call) and last_name(node) in names]
        return sorted(found, key=lambda node: (self.places[node].split(":")[0], node.lineno))

    def constant(self, node: ast.AST | None, within: frozenset[str] = frozenset()) -> Any:
        """Return the value of a literal or a name, or UNKNOWN, as for a name that is set to several values."""
        if isinstance(node, ast.Name | ast.Attribute):
            within |= {last_name(node)}
            name = last_name(node)
            found = [
                [each for each in self.values.get(key, []) if last_name(each) not in within]
                for key in (name, f"{name}=")
            ]
            values = [self.constant(each, within) for each in found[0] or found[1]]
            return values[0] if values and all(each == values[0] for each in values) else UNKNOWN
        try:
            return UNKNOWN if node is None else ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return UNKNOWN

    def module(self) -> ast.Call | None:
        """Return the call that makes the trained module; otherwise one of the last class that is no part of another."""
        classes: dict[str, ast.ClassDef] = {}
        for node in self.statements:
            if isinstance(node, ast.ClassDef) and {last_name(base) for base in node.bases} & {*MODULES, *classes}:
                classes[node.name] = node
        used: list[ast.expr | None] = []
        used += [call.func.value for call in self.calls("parameters") if isinstance(call.func, ast.Attribute)]
        fits = [call for call in self.calls("Trainer", "fit") if "trainer" in ast.unparse(call.func).lower()]
        used += [first_argument(call, "model") for call in fits]
        found = next(filter(None, map(self._made, [*used, *self.calls(*classes)])), None)
        if found is None and classes:
            parts = {name for each in classes.values() for name in _loaded(each)}
            node = [each for name, each in classes.items() if name not in parts or len(classes) == 1][-1]
            start = [each.args for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            names = [each.arg for args in start for each in args.args[1 : len(args.args) - len(args.defaults)]]
            found = ast.Call(ast.Name(node.name, ast.Load()), [ast.Name(name, ast.Load()) for name in names], [])
            self.places[found] = self.places[node]
        return found

    def _made(self, node: ast.AST | None) -> ast.Call | None:
        for _ in range(20):  # follow names, and leave out moves to a device
            if isinstance(node, ast.Name):
                name = node.id
                node = next((each for each in self.values.get(name, []) if name not in _loaded(each)), None)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MOVES:
                node = node.func.value
        return node if isinstance(node, ast.Call) else None

    def needed(self, node: ast.AST) -> tuple[list[str], set[str]]:
        """Return the texts of the statements that an expression needs, and its names that the files do not define."""
        known: dict[str, ast.stmt] = {}
        for statement in sorted(self.statements, key=lambda each: not isinstance(each, ast.ImportFrom)):
            known |= dict.fromkeys(_bound(statement), statement)  # a definition replaces its import in another file
        chosen, queue = set[ast.stmt](), [node]
        while queue:
            more = {known[name] for name in _loaded(queue.pop()) if name in known} - chosen
            chosen |= more
            queue += more
        texts = []
        for each in filter(chosen.__contains__, self.statements):
            first = min([each.lineno, *(inner.lineno for inner in getattr(each, "decorator_list", []))])
            texts.append("\n".join(self.statements[each][1].splitlines()[first - 1 : each.end_lineno]))
        return texts, {name for name in _loaded(node) if name not in known and not hasattr(builtins, name)}


def last_name(node: ast.AST | None) -> str:
    """Return the last name of an expression: ``SGD`` of ``torch.optim.SGD(...)``."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def first_argument(call: ast.Call, name: str) -> ast.expr | None:
    """Return the argument of a call that has a name, or is the first."""
    return next((each.value for each in call.keywords if each.arg == name), call.args[0] if call.args else None)


def _set(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a node sets, with the values: by assignments, options, and (``name=``) as defaults."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from ((last_name(target), node.value) for target in targets)
    elif isinstance(node, ast.arguments):
        pairs = [*zip(node.args[::-1], node.defaults[::-1]), *zip(node.kwonlyargs, node.kw_defaults)]  # noqa: B905
        yield from ((f"{each.arg}=", default) for each, default in pairs if default is not None)
    elif isinstance(node, ast.Call) and last_name(node) == "add_argument":
        flags = [str(each.value).lstrip("-").replace("-", "_") for each in node.args if isinstance(each, ast.Constant)]
        yield from ((flag, each.value) for flag in flags for each in node.keywords if each.arg == "default")


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [each.asname or each.name.split(".")[0] for each in node.names]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else [name for name, _ in _set(node)]


def _loaded(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def _table(lines: list[Line]) -> str:
    rows = [[cell.replace("|", "\\|") for cell in line] for line in [("place", "script", "here"), ("---",) * 3, *lines]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


class _Literals(ast.NodeTransformer):
    """Replaces names by their constant values, or by the configurations that are made for them."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def visit(self, node: ast.AST) -> Any:
        value = self.script.constant(node) if isinstance(node, ast.Name | ast.Attribute) else UNKNOWN
        made = self.script.values.get(node.id, []) if isinstance(node, ast.Name) else []
        if len(made) == 1 and last_name(made[0]).endswith("Config"):
            return self.generic_visit(ast.parse(ast.unparse(made[0]), mode="eval").body)
        return self.generic_visit(node) if value is UNKNOWN else ast.parse(repr(value), mode="eval").body


class Conversion(Script):
    """Experiment and module of a script, with lists of what was taken over and of what is left to do.

    Raise ExperimentError if a file cannot be read, or makes no module.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self.path, self.taken, self.left = path, list[Line](), list[Line]()
        self.data: dict[str, Any] = {"dataset": "arrays", "source": {"path": "data.npz"}}
        self.data |= {"partition": {"scheme": "iid", "clients": 10}, "held_out_fraction": 0.2}
        local = {"epochs": 1, "batch_size": 32, "lr": 0.01}
        self.experiment: dict[str, Any] = {
            "name": re.sub(r"\W+", "-", name).strip("-") or "script",
            "data": self.data,
            "model": {"name": "module", "factory": "network:build"},
            "algorithm": {"name": "fedavg", "local": local, "personalize_steps": 20},
            "federation": {"rounds": 10, "clients_per_round": 8},
            "runtime": {"workers": 0},
        }
        self.network = self._take_module()
        self._take_data()
        self._take_training()

    def files(self) -> dict[str, str]:
        """Return the texts of the files to write, by name."""
        local = self.experiment["algorithm"]["local"]
        alone = {
            "name": "local",
            "local": local | {"epochs": local["epochs"] * self.experiment["federation"]["rounds"]},
        }
        fetch = "" if "source" in self.data else f"fedloom data fetch {self.data['dataset']}\n"
        tables = {"left": _table(self.left), "taken": _table(self.taken)}
        readme = README.format(script=self.path.name, fetch=fetch, alone=as_yaml(alone), **tables)
        return {"README.md": readme, "experiment.yaml": as_yaml_document(self.experiment), "network.py": self.network}

    def _put(self, key: str, value: Any, node: ast.AST) -> None:
        *parents, name = key.split(".")
        section = functools.reduce(operator.getitem, parents, self.experiment)
        section[name] = list(value) if isinstance(value, tuple) else value
        self._list(self.taken, node, f"{key}: {as_yaml(section[name])}")

    def _leave(self, node: ast.AST | None, advice: str) -> None:
        self._list(self.left, node, advice)

    def _list(self, lines: list[Line], node: ast.AST | None, result: str) -> None:
        text = "nothing found" if node is None else " ".join(ast.unparse(node).split())
        place = "" if node is None else self.places[node]
        lines.append((place, text if len(text) <= 60 else f"{text[:57]}...", result))

    def _take_module(self) -> str:
        """Return the text of a file with the factory of the module, and what it needs."""
        call = self.module()
        if call is None:
            message = f"{self.path} makes no PyTorch module: it has neither a class of modules nor an optimizer."
            hint = "give the file that defines the module, or trains it"
            raise ExperimentError(message, key="from", found=str(self.path), hint=hint)
        expression = _Literals(self).visit(ast.parse(ast.unparse(call), mode="eval").body)
        texts, missing = self.needed(expression)
        self._list(self.taken, call, "network.py: build")
        if missing:
            self._leave(call, f"set {', '.join(sorted(missing))} in build of network.py")
        head = f'"""The module of {self.places[call]}."""\n\nfrom __future__ import annotations'
        build = f"\ndef build(input_shape, classes):\n    return {ast.unparse(expression)}\n"
        return "\n\n".join([head, *texts, build])

    def _take_data(self) -> None:
        """Name the data set or its file, or list how to make a file."""
        hub = self.calls("load_dataset", "FederatedDataset")
        named = [(call, self.constant(first_argument(call, "dataset"))) for call in hub]
        named += [(call, last_name(call)) for call in self.calls("MNIST", "FashionMNIST", "CIFAR10", "CIFAR100")]
        for call, name in named:
            if (known := DATASETS.get(re.sub(r"^.*/|[-_]", "", str(name).lower()))) is not None:
                del self.data["source"]
                return self._put("data.dataset", known, call)
        for call in self.calls("ImageFolder", "read_csv", "read_parquet"):
            path, table = self.constant(first_argument(call, "root")), last_name(call) != "ImageFolder"
            if isinstance(path, str):
                return self._take_file(call, self.path.parent / path, table=table)
        source = next(iter([*hub, *self.calls("TensorDataset", "DataLoader")]), None)
        return self._leave(source, "write data.npz (README.md), or name files in data.source")

    def _take_file(self, call: ast.Call, file: Path, *, table: bool) -> None:
        """Name the folder of images, or the table and the column of its labels."""
        self._put("data.dataset", "table" if table else "folder", call)
        self._put("data.source.path", str(file.resolve()), call)
        if not file.exists():
            self._leave(call, "set data.source.path, which does not exist")
        for each in self.calls("pop", "drop") if table else []:
            if isinstance(label := self.constant(first_argument(each, "columns")), str):
                return self._put("data.source.label", label, each)
        return self._leave(call, "set data.source.label, the column of the labels") if table else None

    def _take_training(self) -> None:
        """Take over the optimizer, batches, epochs and the task; the first node that sets a key counts."""
        imports = " ".join(ast.unparse(node) for node in self.places if isinstance(node, ast.Import | ast.ImportFrom))
        federated = re.search(r"\b(flwr|flwr_datasets|nvflare)\b", imports) is not None
        decided: set[str] = set()
        for name, node, value in self._settings():
            key = LOCAL + "epochs" if federated and name == ROUNDS else name if "." in name else LOCAL + name
            if key in decided or value is None:
                continue
            decided.add(key)
            if key == TASK and "source" not in self.data:
                self._leave(node, "choose task, or give the module a method loss(outputs, y)")
            elif value is UNKNOWN:
                self._leave(node, f"set {key}")
            else:
                self._put(key, value, node)
        for key in sorted({LOCAL + "optimizer", LOCAL + "batch_size", ROUNDS} - decided):
            self._leave(None, f"set {key}")
        if federated:
            self.data["held_out_fraction"], self.experiment["federation"]["clients_per_round"] = 0, 10
        natural = "data.source.client (their column), with data.partition: {scheme: natural}"
        owner = natural if "source" in self.data else "data.partition"
        self._leave(None, f"choose the clients in {owner}; they are ten equal parts of the data")
        for call in self.calls("SGD", "Adam", "AdamW")[1:]:
            self._leave(call, "one optimizer trains all parameters; this one is left out")
        for name, call in {last_name(call): call for call in self.places if isinstance(call, ast.Call)}.items():
            for advice in (advice for pattern, advice in ADVICE.items() if re.fullmatch(pattern, name)):
                self._leave(call, advice)

    def _settings(self) -> Iterator[tuple[str, ast.AST, Any]]:
        """Yield keys, the nodes that set them, and the values."""
        for call in self.calls(*SIGNATURES, *DEFAULTS):
            given = [*zip(SIGNATURES.get(last_name(call), "").split(), call.args, strict=False)]
            given += [(each.arg, each.value) for each in call.keywords if each.arg is not None]
            for name, node in given:
                value = self.constant(node)
                if name in NAMES:
                    yield NAMES[name], call, UNKNOWN if isinstance(value, str) else value
            yield from ((name, call, value) for name, value in DEFAULTS.get(last_name(call), {}).items())
        for loop in (node for node in self.places if isinstance(node, ast.For)):
            ranges = [each for each in ast.walk(loop.iter) if isinstance(each, ast.Call) and last_name(each) == "range"]
            if ranges and ranges[0].args and "epoch" in f"{ast.unparse(loop.target)} {ast.unparse(loop.iter)}".lower():
                stop = ranges[0].args[:2][-1]  # range(epochs), or range(1, epochs + 1)
                yield ROUNDS, loop.iter, self.constant(stop.left if isinstance(stop, ast.BinOp) else stop)
