"""The processes of a cell: training, ranks, measurements."""
