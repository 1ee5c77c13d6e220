"""Computing steps, in both tiers: block pool, sequences, batch building, runner, sampler, step loop."""
