from hadal.plugins.data_efficiency import *
