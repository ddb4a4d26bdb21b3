"""Write the store that the scheduled jobs read: real maps of air temperature, one a chunk.

python maps.py maps.zarr
"""

import sys

from dask_redist.demo import store_maps

if __name__ == "__main__":
    print(store_maps(sys.argv[1]).sizes)
