"""`lockstep report`: makes an HTML page of one run or several."""
