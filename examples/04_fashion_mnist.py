"""Pictures of clothes with a small convolutional network, the whole model on every worker.

python examples/04_fashion_mnist.py                                            # alone, in one process
everstep run --mode allreduce --workers 2 examples/04_fashion_mnist.py         # the same script on a local cluster
"""

import torch
from torch import nn

import everstep as es
from fashion import KINDS, nearest_mean, options, read


def network() -> nn.Module:
    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(
        *stage(1, 16), *stage(16, 32), nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, KINDS)
    )


args = options(__doc__)
train, test = read(args.data, "train"), read(args.data, "t10k")

job = es.join(mode="allreduce")
model = job.replicate(network())
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=args.lr))
loader = job.loader(train, args.batch_size, epochs=args.epochs)
for batch in job.steps(loader):
    loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"].long())
    opt.zero_grad()
    loss.backward()
    opt.step()
    job.report(loss=loss)

if job.chief:
    with job.eval(model):
        guess = model(torch.from_numpy(test["image"])).argmax(1)
    accuracy = float((guess.numpy() == test["label"]).mean())
    baseline = nearest_mean(train, test)
    job.report(accuracy=accuracy, accuracy_nearest_mean=baseline)
    job.log(f"test accuracy {accuracy:.4f} (network)   {baseline:.4f} (nearest mean picture)")
