"""The throughput model in TorchRec on two gloo ranks: fbgemm's fused tables, table-wise sharding, dense part in DDP.

Runs in an environment of its own (``pip install torch==2.13.0``, then ``--no-deps torchrec==1.8.0
fbgemm-gpu-cpu==1.8.0`` and what they import); start it with that environment's Python, it starts its two ranks
itself. Fingerprints one JSON line: samples/s and CPU seconds of both ranks together.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from throughput_model import N_CAT, Dense, Meter, cached_data


def rank_main(rank: int, ranks: int, port: int, args: argparse.Namespace) -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.types import ShardingEnv, ShardingType
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    names = [f"t{i}" for i in range(N_CAT)]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = EmbeddingBagCollection(
                device=torch.device("meta"),
                tables=[
                    EmbeddingBagConfig(
                        name=n,
                        embedding_dim=args.dim,
                        num_embeddings=args.rows,
                        feature_names=[n],
                        weight_init_min=-0.05,
                        weight_init_max=0.05,
                    )
                    for n in names
                ],
            )
            self.dense = Dense(args.dim)

        def forward(self, dense: torch.Tensor, sparse: Any) -> torch.Tensor:
            pooled = self.tables(sparse).values()
            out: torch.Tensor = self.dense(dense, list(pooled.split(args.dim, dim=1)))
            return out

    model = Model()
    fused: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.02}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    constraints = {n: ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value]) for n in names}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, local_world_size=ranks, compute_device="cpu"), constraints=constraints
    )
    group = dist.group.WORLD
    plan = planner.collective_plan(model, [sharder], group)  # type: ignore[list-item, arg-type]
    sharded = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(group),  # type: ignore[arg-type]
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],  # type: ignore[list-item]
    )
    dense_parameters = [p for n, p in sharded.named_parameters() if "dense" in n]
    opt = torch.optim.Adam(dense_parameters, lr=1e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    source = {name: torch.from_numpy(a) for name, a in cached_data(args.samples, args.rows, args.data).items()}
    mine = torch.randperm(args.samples)[rank::ranks]
    per_epoch = len(mine) // args.batch_size
    lengths = torch.ones(N_CAT * args.batch_size, dtype=torch.int32)
    meter = Meter(args.warm)
    for i in range(args.batches):
        at = (i % per_epoch) * args.batch_size
        rows = mine[at : at + args.batch_size]
        values = source["cat"][rows].t().reshape(-1).contiguous()
        sparse = KeyedJaggedTensor(keys=names, values=values, lengths=lengths)
        loss = loss_fn(sharded(source["dense"][rows], sparse), source["label"][rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i + 1 == args.warm:
            dist.barrier()
        meter.batch(args.batch_size)
    dist.barrier()
    result = meter.result()
    cpu = torch.tensor([result["cpu_s_per_million"]])
    dist.all_reduce(cpu)
    if rank == 0:
        result["samples_per_s"] *= ranks
        result["samples"] *= ranks
        result["cpu_s_per_million"] = float(cpu[0]) / ranks
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--samples", type=int, default=400_000)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--warm", type=int, default=20)
    parser.add_argument("--data", default="")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(rank_main, (args.ranks, port, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
