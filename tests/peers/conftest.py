# They are for the peers' runs: imported here they would put regard into this one.
collect_ignore = ["plugins"]
