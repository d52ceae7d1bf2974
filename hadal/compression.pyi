from hadal.plugins.compression import *
