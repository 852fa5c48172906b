"""The worker side: moves the bytes of jobs between HBM, the DRAM pool and SSD. Takes no decisions."""
