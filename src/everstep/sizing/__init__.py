"""Says what size a job should have before it runs: pure arithmetic on what a probe and earlier jobs measured."""
