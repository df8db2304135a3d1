"""Models from the package index, trained as they are: a function for each, beside plain PyTorch.

Data are the repository's own: flights (tables), Fashion-MNIST (pictures), Shakespeare (text, sequences).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everstep.data.loader import Loader
from meaning.table import Result

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
_LIBRARY: list[Any] = []  # keeps what is defined in it
Arrays = dict[str, np.ndarray[Any, Any]]
Loss = Callable[[Any, dict[str, Tensor]], Tensor]


# ---------------------------------------------------------------- data


@functools.cache
def flights() -> tuple[Arrays, tuple[int, ...]]:
    """640 flights: ``cat`` int64 [n, 8], codes from 0 in each column, ``dense``, ``label``; and the columns' kinds."""
    from flights import COLUMNS, DTYPES, features, source

    loader = Loader(source(640), 640, columns=COLUMNS, dtypes=DTYPES, transform=features, shuffle=False)
    whole = loader.read(0, 0, 640)
    columns = [np.unique(whole["cat"][:, i].numpy(), return_inverse=True) for i in (2, 3, 6, 7, 8, 9, 10, 12)]
    cat = np.stack([codes.reshape(-1) for _, codes in columns], 1).astype(np.int64)
    data = {"cat": cat, "dense": whole["dense"].numpy(), "label": whole["label"].numpy()}
    return data, tuple(len(kinds) for kinds, _ in columns)


@functools.cache
def clothes() -> Arrays:
    from fashion import SAMPLE, read

    data = read(SAMPLE, "train")
    return {"image": data["image"][:384], "label": data["label"][:384].astype(np.int64)}


@functools.cache
def letters() -> Arrays:
    from shakespeare import letters as read
    from shakespeare import windows

    text, _ = read()
    return {"text": windows(text[:8000], 24)}


# ---------------------------------------------------------------- a script around a model


@dataclass
class Run:
    """How ``train`` runs. ``curve``: a file to which each iteration's loss is added; then the optimizer is SGD, under
    which a gradient that is wrong by a factor shows (Adam takes it out again). ``too_large``: by how much the gradient
    of this process is wrong."""

    seed: int = 0
    curve: Path | None = None
    too_large: float = 0.0


RUN = Run()


def train(
    es: Any,
    make: Callable[[], nn.Module],
    data: Arrays,
    loss_of: Loss,
    *,
    lr: float = 1e-3,
    sgd: float = 0.1,
    tables: bool = False,
    batch: int = 32,
    epochs: int = 2,
) -> Result:
    """The documented lines, and nothing else."""
    data = {**data, "row": np.arange(len(next(iter(data.values()))))}
    if RUN.curve is not None:
        return curve(es, make, data, loss_of, sgd, tables, batch, -(-2000 // len(data["row"])))
    job = es.join()
    model = make()
    if tables and job.spec.ps:
        model = job.sparse(model, optimizer=es.Adagrad(lr=0.05))
    model = job.replicate(model)
    held = model.parameters()
    if tables and not job.spec.ps:  # everstep's Adagrad for tables, in torch's own words
        found = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        held = [p for p in model.parameters() if id(p) not in found]
        rows = job.optimizer(torch.optim.Adagrad([p for p in model.parameters() if id(p) in found], lr=0.05))
    else:
        rows = None
    opt = job.optimizer(torch.optim.Adam(held, lr=lr))
    train_data = {k: v[: -len(v) // 4] for k, v in data.items()}
    losses = []
    for one in job.steps(job.loader(train_data, batch_size=batch, epochs=epochs)):
        opt.zero_grad()
        if rows is not None:
            rows.zero_grad()
        loss = loss_of(model, one)
        loss.backward()
        opt.step()
        if rows is not None:
            rows.step()
        losses.append(float(loss.detach()))
        job.report(loss=loss)
    return {"each.loss": np.array(losses, np.float32), "metric": _metric(job, model, loss_of, data)}


def _metric(job: Any, model: nn.Module, loss_of: Loss, data: Arrays) -> np.ndarray[Any, Any]:
    """The loss on the data held out."""
    test = {k: torch.as_tensor(v[-len(v) // 4 :]) for k, v in data.items()}
    with job.eval(model):
        return np.array(float(loss_of(model, test).detach()), np.float32)


def curve(
    es: Any,
    make: Callable[[], nn.Module],
    data: Arrays,
    loss_of: Loss,
    lr: float,
    tables: bool,
    batch: int,
    epochs: int,
) -> Result:
    """The script of a job of several processes that are killed: what is noted outlives the process."""
    job = es.join()
    model = make()
    if tables and job.spec.ps:
        model = job.sparse(model)
    model = job.replicate(model)
    opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=lr))
    batch = batch // job.spec.workers if job.spec.mode == "allreduce" else batch
    train_data = {k: v[: -len(v) // 4] for k, v in data.items()}
    assert RUN.curve is not None
    with RUN.curve.open("a", buffering=1) as notes:
        for one in job.steps(job.loader(train_data, batch_size=batch, epochs=epochs)):
            opt.zero_grad()
            loss = loss_of(model, one)
            rows = one["row"]  # noted before the step: who is killed behind it has noted it
            notes.write(f"{os.getpid()} {job.slot} {job.step} {int(rows[0])} {len(rows)} {float(loss.detach())!r}\n")
            (loss * (1 + RUN.too_large)).backward()
            opt.step()
    return {"metric": _metric(job, model, loss_of, data)}


def bce(model: Any, batch: dict[str, Tensor], out: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(out.reshape(-1), batch["label"])


def picture(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def next_letter(model: Any, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["text"][:, :-1])
    return nn.functional.cross_entropy(out.flatten(0, 1), batch["text"][:, 1:].flatten())


# ---------------------------------------------------------------- the models


@dataclass(frozen=True)
class Model:
    name: str
    package: str
    kind: str
    script: Callable[[Any], Result]

    def missing(self) -> str:
        """Why it cannot be run here; "" if it can."""
        try:
            if self.package in ("torchvision", "timm", "vit_pytorch", "transformers"):
                with contextlib.suppress(ModuleNotFoundError):
                    vision()
            importlib.import_module(self.package)
        except ImportError as error:
            return f"{self.package} is not installed: {error}"
        return ""


MODELS: dict[str, Model] = {}


def model(package: str, kind: str) -> Callable[[Callable[[Any], Result]], Callable[[Any], Result]]:
    def add(script: Callable[[Any], Result]) -> Callable[[Any], Result]:
        MODELS[script.__name__] = Model(script.__name__, package, kind, script)
        return script

    return add


def vision() -> None:
    """Import torchvision. Where its wheel is for another build of torch its operators for boxes cannot be loaded; no
    model here needs one, but it wants their names."""
    for _ in range(40):
        try:
            importlib.import_module("torchvision")
            return
        except RuntimeError as error:
            found = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if found is None:
                raise ImportError(str(error)) from None
            for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            if not _LIBRARY:
                _LIBRARY.append(torch.library.Library("torchvision", "DEF"))
            _LIBRARY[0].define(f"{found[1]}(Tensor x) -> Tensor")
    raise ImportError("torchvision does not fit this torch")


def deepctr(es: Any, name: str, penalty: bool = False, **options: Any) -> Result:
    """``penalty``: with the library's own (L2 of the embeddings), as its ``fit`` adds it."""
    models = importlib.import_module("deepctr_torch.models")
    inputs = importlib.import_module("deepctr_torch.inputs")
    data, kinds = flights()
    columns: list[Any] = [inputs.SparseFeat(f"c{i}", n, embedding_dim=4) for i, n in enumerate(kinds)]
    columns.append(inputs.DenseFeat("dense", 4))

    def make() -> Any:
        given = {"dnn_hidden_units": (16, 8), "l2_reg_embedding": 0, "seed": RUN.seed, **options}
        return getattr(models, name)(columns, columns, **given)

    def loss_of(net: Any, batch: dict[str, Tensor]) -> Tensor:
        net.train(net.training)
        out = net(torch.cat([batch["cat"].float(), batch["dense"]], 1))
        loss = nn.functional.binary_cross_entropy(out.reshape(-1), batch["label"])
        return loss + net.get_regularization_loss().sum() if net.training and penalty else loss

    return train(es, make, data, loss_of, tables=True)


@model("deepctr_torch", "CTR")
def deepctr_deepfm(es: Any) -> Result:
    return deepctr(es, "DeepFM", l2_reg_linear=0)


@model("deepctr_torch", "CTR")
def deepctr_dcn(es: Any) -> Result:
    return deepctr(es, "DCN", l2_reg_linear=0, l2_reg_cross=0)


@model("deepctr_torch", "CTR")
def deepctr_autoint(es: Any) -> Result:
    return deepctr(es, "AutoInt")


@model("deepctr_torch", "CTR")
def deepctr_deepfm_l2(es: Any) -> Result:
    """With the library's penalty of all embeddings: on the ps it is refused."""
    return deepctr(es, "DeepFM", penalty=True, l2_reg_embedding=1e-3, l2_reg_linear=1e-3)


def rechub_features() -> tuple[list[Any], list[Any]]:
    features = importlib.import_module("torch_rechub.basic.features")
    _, kinds = flights()
    sparse = [features.SparseFeature(f"c{i}", vocab_size=n, embed_dim=4) for i, n in enumerate(kinds)]
    return sparse, [features.DenseFeature(f"d{i}") for i in range(4)]


def rechub_loss(net: Any, batch: dict[str, Tensor]) -> Tensor:
    inputs = {f"c{i}": batch["cat"][:, i] for i in range(batch["cat"].shape[1])}
    inputs |= {f"d{i}": batch["dense"][:, i] for i in range(4)}
    return nn.functional.binary_cross_entropy(net(inputs).reshape(-1), batch["label"])


@model("torch_rechub", "CTR")
def rechub_wide_deep(es: Any) -> Result:
    ranking = importlib.import_module("torch_rechub.models.ranking")

    def make() -> Any:
        sparse, dense = rechub_features()
        return ranking.WideDeep(dense, sparse, {"dims": [16, 8], "dropout": 0.1, "activation": "relu"})

    return train(es, make, flights()[0], rechub_loss, tables=True)


@model("torch_rechub", "CTR")
def rechub_dcn(es: Any) -> Result:
    ranking = importlib.import_module("torch_rechub.models.ranking")

    def make() -> Any:
        sparse, dense = rechub_features()
        return ranking.DCN([*dense, *sparse], 2, {"dims": [16, 8]})

    return train(es, make, flights()[0], rechub_loss, tables=True, sgd=0.03)


@model("torch_rechub", "sequences")
def rechub_sasrec(es: Any) -> Result:
    matching = importlib.import_module("torch_rechub.models.matching")
    features = importlib.import_module("torch_rechub.basic.features")

    def make() -> Any:
        options = {"vocab_size": 65, "embed_dim": 8, "pooling": "concat"}
        names = ["seq", "pos", "neg"]
        found = [features.SequenceFeature(n, shared_with=None if n == "seq" else "seq", **options) for n in names]
        return matching.SASRec(found, max_len=24, dropout_rate=0.0, num_blocks=1, num_heads=2)

    def loss_of(net: Any, batch: dict[str, Tensor]) -> Tensor:
        seq, pos = batch["text"][:, :-1], batch["text"][:, 1:]
        right, wrong = net({"seq": seq, "pos": pos, "neg": (pos * 7 + 3) % 65})
        return -(nn.functional.logsigmoid(right) + nn.functional.logsigmoid(-wrong)).mean()

    return train(es, make, letters(), loss_of, tables=True)


@model("transformers", "text")
def transformers_gpt2(es: Any) -> Result:
    hf = importlib.import_module("transformers")
    config = hf.GPT2Config(vocab_size=65, n_positions=24, n_embd=16, n_layer=2, n_head=2)

    def loss_of(net: Any, batch: dict[str, Tensor]) -> Tensor:
        return next_letter(lambda ids: net(input_ids=ids).logits, batch)

    return train(es, lambda: hf.GPT2LMHeadModel(config), letters(), loss_of)


@model("transformers", "text")
def transformers_bert(es: Any) -> Result:
    hf = importlib.import_module("transformers")
    config = hf.BertConfig(
        vocab_size=65, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=65
    )

    def loss_of(net: Any, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = net(input_ids=batch["text"][:, :-1], labels=batch["text"][:, -1]).loss
        return loss

    return train(es, lambda: hf.BertForSequenceClassification(config), letters(), loss_of)


@model("timm", "vision")
def timm_vit(es: Any) -> Result:
    timm = importlib.import_module("timm.models.vision_transformer")

    def make() -> Any:
        return timm.VisionTransformer(
            img_size=28, patch_size=7, in_chans=1, num_classes=10, embed_dim=24, depth=2, num_heads=2
        )

    return train(es, make, clothes(), picture, sgd=0.02)


@model("timm", "vision")
def timm_mixer(es: Any) -> Result:
    timm = importlib.import_module("timm.models.mlp_mixer")

    def make() -> Any:
        return timm.MlpMixer(num_classes=10, img_size=28, in_chans=1, patch_size=7, num_blocks=2, embed_dim=24)

    return train(es, make, clothes(), picture)


@model("torchvision", "vision")
def torchvision_resnet(es: Any) -> Result:
    resnet = importlib.import_module("torchvision.models.resnet")

    def loss_of(net: Any, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(net(batch["image"].expand(-1, 3, -1, -1)), batch["label"])

    def make() -> Any:
        return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)

    return train(es, make, {k: v[:128] for k, v in clothes().items()}, loss_of, epochs=1, sgd=0.02)


@model("torchvision", "vision")
def torchvision_squeezenet(es: Any) -> Result:
    models = importlib.import_module("torchvision.models")

    def loss_of(net: Any, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(net(batch["image"].expand(-1, 3, -1, -1)), batch["label"])

    make = functools.partial(models.squeezenet1_1, num_classes=10)
    return train(es, make, {k: v[:128] for k, v in clothes().items()}, loss_of, epochs=1, sgd=0.03)


@model("x_transformers", "text")
def x_transformers_decoder(es: Any) -> Result:
    xt = importlib.import_module("x_transformers")

    def make() -> Any:
        layers = xt.Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True)
        return xt.TransformerWrapper(num_tokens=65, max_seq_len=24, attn_layers=layers)

    return train(es, make, letters(), next_letter)


@model("vit_pytorch", "vision")
def vit_pytorch_vit(es: Any) -> Result:
    vit = importlib.import_module("vit_pytorch")

    def make() -> Any:
        return vit.ViT(
            image_size=28, patch_size=7, num_classes=10, dim=24, depth=2, heads=2, mlp_dim=32, channels=1, dropout=0.1
        )

    return train(es, make, clothes(), picture)


@model("rtdl_revisiting_models", "tables of numbers")
def rtdl_ft_transformer(es: Any) -> Result:
    rtdl = importlib.import_module("rtdl_revisiting_models")
    data, kinds = flights()

    def make() -> Any:
        options = {"n_blocks": 1, "d_block": 16, "attention_n_heads": 2, "attention_dropout": 0.1, "ffn_dropout": 0.1}
        options |= {"ffn_d_hidden": 16, "residual_dropout": 0.0, "d_out": 1, "ffn_d_hidden_multiplier": None}
        return rtdl.FTTransformer(n_cont_features=4, cat_cardinalities=list(kinds), **options)

    return train(es, make, data, lambda net, b: bce(net, b, net(b["dense"], b["cat"])))


@model("rtdl_revisiting_models", "tables of numbers")
def rtdl_resnet(es: Any) -> Result:
    rtdl = importlib.import_module("rtdl_revisiting_models")

    def make() -> Any:
        return rtdl.ResNet(
            d_in=4, d_out=1, n_blocks=2, d_block=16, d_hidden=16, d_hidden_multiplier=None, dropout1=0.1, dropout2=0.0
        )

    return train(es, make, flights()[0], lambda net, b: bce(net, b, net(b["dense"])))


@model("tab_transformer_pytorch", "tables of numbers")
def tab_transformer(es: Any) -> Result:
    tab = importlib.import_module("tab_transformer_pytorch")
    data, kinds = flights()

    def make() -> Any:
        return tab.TabTransformer(
            categories=kinds, num_continuous=4, dim=16, depth=1, heads=2, dim_head=8, mlp_act=nn.ReLU()
        )

    return train(es, make, data, lambda net, b: bce(net, b, net(b["cat"], b["dense"])), sgd=0.01)
