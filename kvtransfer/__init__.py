"""Finding KV blocks in the cluster (`index`) and moving them between workers (`handover`, over `transport`)."""
