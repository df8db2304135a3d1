"""Is all that a training script touches: join, Job, nn, optimizers. Runs embedded (alone) or as a worker of a job."""
