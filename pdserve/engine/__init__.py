"""What both tiers compute with: block pool, sequences, batch building, runner, sampler, step loop."""
