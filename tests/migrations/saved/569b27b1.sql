PRAGMA application_id=1735418482;
BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0017');
CREATE TABLE audit (
	id INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	tenant TEXT NOT NULL, 
	actor TEXT NOT NULL, 
	action TEXT NOT NULL, 
	subject TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	CONSTRAINT pk_audit PRIMARY KEY (id)
);
INSERT INTO "audit" VALUES(1,1.79589627154430556297e+09,'','leader','term.taken','1','');
INSERT INTO "audit" VALUES(2,1.79589627174606823916e+09,'red','admin','token.put','ci','');
CREATE TABLE batch (
	task TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	answer TEXT NOT NULL, 
	CONSTRAINT pk_batch PRIMARY KEY (task)
);
CREATE TABLE checkpoint (
	task TEXT NOT NULL, 
	fence INTEGER NOT NULL, 
	sequence INTEGER NOT NULL, 
	tenant TEXT NOT NULL, 
	at DOUBLE NOT NULL, 
	digest TEXT NOT NULL, 
	size_bytes INTEGER NOT NULL, 
	uri TEXT, 
	CONSTRAINT pk_checkpoint PRIMARY KEY (task, fence, sequence)
);
INSERT INTO "checkpoint" VALUES('first',1,1,'red',1000000.0,'digest',5,NULL);
CREATE TABLE device (
	"key" TEXT NOT NULL, 
	node TEXT NOT NULL, 
	uuid TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	"index" INTEGER NOT NULL, 
	physical_mb INTEGER NOT NULL, 
	reserve_mb INTEGER NOT NULL, 
	declared_foreign_mb INTEGER NOT NULL, 
	parent TEXT NOT NULL, 
	split BOOLEAN NOT NULL, 
	power INTEGER NOT NULL, 
	context_mb INTEGER NOT NULL, 
	simulated BOOLEAN NOT NULL, 
	present BOOLEAN NOT NULL, 
	version INTEGER NOT NULL, 
	leased_mb INTEGER DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_device PRIMARY KEY ("key"), 
	CONSTRAINT ck_device_leased_mb CHECK (leased_mb >= 0 AND leased_mb <= physical_mb)
)
 WITHOUT ROWID

;
INSERT INTO "device" VALUES('test/n1/gpu0','n1','gpu0','H100',0,81920,512,100,'',0,2000,100,0,1,3,25600);
CREATE TABLE estimate (
	tenant TEXT NOT NULL, 
	subject TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	what TEXT NOT NULL, 
	learned_at DOUBLE NOT NULL, 
	counts TEXT NOT NULL, 
	CONSTRAINT pk_estimate PRIMARY KEY (tenant, subject, kind, what), 
	CONSTRAINT ck_estimate_what CHECK (what IN ('gpu_mb', 'seconds', 'start_error_seconds', 'start_share'))
)
 WITHOUT ROWID

;
INSERT INTO "estimate" VALUES('red','x','H100','gpu_mb',1000000.0,'[[41,1]]');
CREATE TABLE event (
	position INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	kind TEXT NOT NULL, 
	"key" TEXT NOT NULL, 
	version INTEGER NOT NULL, 
	tenant TEXT NOT NULL, 
	task TEXT, 
	fields TEXT NOT NULL, 
	reader INTEGER NOT NULL, 
	CONSTRAINT pk_event PRIMARY KEY (position)
);
INSERT INTO "event" VALUES(1,1.7958962715548958778e+09,'node.seen','n1',1,'',NULL,'{"name":"n1","cpu":64.0,"memory_mb":262144,"max_runs":64,"incarnation":"n1-1","boot_id":"boot-1","ready":true,"cordoned":false,"labels":[["zone","a"]],"custom":[["licence",2.0]],"version":1}',1);
INSERT INTO "event" VALUES(2,1.7958962715548958778e+09,'device.seen','test/n1/gpu0',1,'',NULL,'{"key":"test/n1/gpu0","node":"n1","uuid":"gpu0","kind":"H100","index":0,"physical_mb":81920,"reserve_mb":512,"declared_foreign_mb":100,"power":2000,"context_mb":100,"simulated":false,"parent":"","split":false,"present":true,"version":1}',1);
INSERT INTO "event" VALUES(3,1.79589627156980252264e+09,'task.submitted','first',1,'red','first','{"id":"first","tenant":"red","name":"name of first","priority":50,"demand":{"gpus":1,"gpu_mb":10240,"cpu":1.5,"memory_mb":64,"custom":[["licence",1.0]],"where":{"kinds":["H100"],"min_power":5,"min_device_mb":40960,"nodes":[["zone",["a","b"]]],"devices":["gpu0"],"prefer_kinds":["H200"]},"pool":"lab"},"submitted_at":1000000.0,"max_retries":2,"timeout_seconds":60.0,"deadline_at":2000000.0,"stream":"s","subject":"x","queued_bytes":7,"expires_at":1000005.0,"state":"pending"}',1);
INSERT INTO "event" VALUES(4,1.79589627157226777078e+09,'task.submitted','waits',1,'red','waits','{"id":"waits","tenant":"red","name":"name of waits","priority":50,"demand":{"gpus":1,"gpu_mb":10240,"cpu":1.5,"memory_mb":64,"custom":[["licence",1.0]],"where":{"kinds":["H100"],"min_power":5,"min_device_mb":40960,"nodes":[["zone",["a","b"]]],"devices":["gpu0"],"prefer_kinds":["H200"]},"pool":"lab"},"submitted_at":1000000.0,"after":[["first","fail"],["gone","ignore"]],"held":true,"awaits":true,"state":"pending"}',1);
INSERT INTO "event" VALUES(5,1.79589627158573842055e+09,'task.admitted','first',2,'red','first','{"state":"admitted","fence":1,"node":"n1","admitted_at":1000000.0}',1);
INSERT INTO "event" VALUES(6,1.79589627158573842055e+09,'lease.reserved','run:first:1:0:test/n1/gpu0',1,'red','first','{"holder_kind":"run","holder":"first","fence":1,"device":"test/n1/gpu0","mb":5120,"tenant":"red","priority":50,"since":1000000.0,"state":"reserved","version":1,"rank":0,"context_mb":100,"overused_mb":0}',1);
INSERT INTO "event" VALUES(7,1.79589627159786105158e+09,'task.started','first',3,'red','first','{"state":"running","started_at":1000002.0}',1);
INSERT INTO "event" VALUES(8,1.79589627159786105158e+09,'lease.held','run:first:1:0:test/n1/gpu0',2,'red','first','{"state":"held"}',1);
INSERT INTO "event" VALUES(9,1.79589627160113644594e+09,'lease.overused','run:first:1:0:test/n1/gpu0',3,'red','first','{"state":"held","mb":5120,"overused_mb":6144}',1);
INSERT INTO "event" VALUES(10,1.79589627160671138758e+09,'task.changed','first',4,'red','first','{"state":"running","checkpoint_at":1000003.0}',1);
INSERT INTO "event" VALUES(11,1795896271.61415,'task.stopping','first',5,'red','first','{"state":"stopping","stop_reason":"preempt","stop_deadline_at":1000030.0,"freeing_for":"waits"}',1);
INSERT INTO "event" VALUES(12,1.79589627162349414822e+09,'task.failed','first',6,'red','first','{"state":"failed","finished_at":1000009.0}',1);
INSERT INTO "event" VALUES(13,1.79589627162349414822e+09,'lease.quarantined','run:first:1:0:test/n1/gpu0',4,'red','first','{"state":"quarantined","quarantined_at":1000000.0}',1);
INSERT INTO "event" VALUES(14,1795896271.6324,'task.submitted','again',1,'red','again','{"id":"again","tenant":"red","name":"name of again","priority":50,"demand":{"gpus":1,"gpu_mb":10240,"cpu":1.5,"memory_mb":64,"custom":[["licence",1.0]],"where":{"kinds":["H100"],"min_power":5,"min_device_mb":40960,"nodes":[["zone",["a","b"]]],"devices":["gpu0"],"prefer_kinds":["H200"]},"pool":"lab"},"submitted_at":1000000.0,"shareable":true,"state":"pending"}',1);
INSERT INTO "event" VALUES(15,1.79589627163627266887e+09,'task.admitted','again',2,'red','again','{"state":"admitted","fence":1,"node":"n1","admitted_at":1000000.0}',1);
INSERT INTO "event" VALUES(16,1.7958962716425364018e+09,'task.requeued','again',3,'red','again','{"state":"pending","failures":1,"preemptions":1,"not_before":1000060.0,"node":null}',1);
INSERT INTO "event" VALUES(17,1.79589627164467716211e+09,'task.submitted','over',1,'red','over','{"id":"over","tenant":"red","name":"name of over","priority":50,"demand":{"gpus":1,"gpu_mb":10240,"cpu":1.5,"memory_mb":64,"custom":[["licence",1.0]],"where":{"kinds":["H100"],"min_power":5,"min_device_mb":40960,"nodes":[["zone",["a","b"]]],"devices":["gpu0"],"prefer_kinds":["H200"]},"pool":"lab"},"submitted_at":1000000.0,"state":"pending"}',1);
INSERT INTO "event" VALUES(18,1.79589627165226864815e+09,'task.admitted','over',2,'red','over','{"state":"admitted","fence":1,"node":"n1","admitted_at":1000000.0}',1);
INSERT INTO "event" VALUES(19,1.79589627165226864815e+09,'lease.reserved','run:over:1:0:test/n1/gpu0',1,'red','over','{"holder_kind":"run","holder":"over","fence":1,"device":"test/n1/gpu0","mb":5120,"tenant":"red","priority":50,"since":1000000.0,"state":"reserved","version":1,"rank":0,"context_mb":100,"overused_mb":0}',1);
INSERT INTO "event" VALUES(20,1.79589627165853500364e+09,'task.started','over',3,'red','over','{"state":"running","started_at":1000000.0}',1);
INSERT INTO "event" VALUES(21,1.79589627165853500364e+09,'lease.held','run:over:1:0:test/n1/gpu0',2,'red','over','{"state":"held"}',1);
INSERT INTO "event" VALUES(22,1.79589627166374254225e+09,'task.succeeded','over',4,'red','over','{"state":"succeeded","finished_at":1000000.0}',1);
INSERT INTO "event" VALUES(23,1.79589627166374254225e+09,'lease.released','run:over:1:0:test/n1/gpu0',3,'red','over','{"state":"released","proof":"process_absent"}',1);
INSERT INTO "event" VALUES(24,1.7958962716682293415e+09,'task.submitted','gang',1,'red','gang','{"id":"gang","tenant":"red","name":"name of gang","priority":50,"demand":{"slots":[["tenant:red",1.0]],"bundles":[{"gpus":1,"gpu_mb":5120},{"gpus":1,"gpu_mb":5120}],"strategy":"spread","min_ranks":1},"submitted_at":1000000.0,"state":"pending"}',1);
INSERT INTO "event" VALUES(25,1.79589627167646932607e+09,'task.admitted','gang',2,'red','gang','{"state":"admitted","members":[[0,"n1","placed",false,""],[1,"n1","placed",false,""]],"fence":1,"node":"n1","admitted_at":1000000.0}',1);
INSERT INTO "event" VALUES(26,1.79589627167646932607e+09,'lease.reserved','gang_member:gang:1:0:test/n1/gpu0',1,'red','gang','{"holder_kind":"gang_member","holder":"gang","fence":1,"device":"test/n1/gpu0","mb":5120,"tenant":"red","priority":50,"since":1000000.0,"state":"reserved","version":1,"rank":0,"context_mb":100,"overused_mb":0}',1);
INSERT INTO "event" VALUES(27,1.79589627167646932607e+09,'lease.reserved','gang_member:gang:1:1:test/n1/gpu0',1,'red','gang','{"holder_kind":"gang_member","holder":"gang","fence":1,"device":"test/n1/gpu0","mb":5120,"tenant":"red","priority":50,"since":1000000.0,"state":"reserved","version":1,"rank":1,"context_mb":100,"overused_mb":0}',1);
INSERT INTO "event" VALUES(28,1.79589627168011760705e+09,'task.started','gang',3,'red','gang','{"state":"running","members":[[0,"n1","ready",false,"127.0.0.1:9"],[1,"n1","leaving",true,"127.0.0.1:8","waits",1000030.0]],"started_at":1000000.0}',1);
INSERT INTO "event" VALUES(29,1.79589627168315696718e+09,'task.changed','gang',4,'red','gang','{"state":"running","members":[[0,"n1","ready",false,"127.0.0.1:9"],[1,"n1","leaving",true,"127.0.0.1:8","waits",1000030.0],[2,"n1","placed",false,"",null,1000009.0,1]]}',4);
INSERT INTO "event" VALUES(30,1.79589627169243931767e+09,'task.submitted','lease',1,'red','lease','{"id":"lease","tenant":"red","name":"name of lease","priority":50,"demand":{"gpus":1,"gpu_mb":10240,"cpu":1.5,"memory_mb":64,"custom":[["licence",1.0]],"where":{"kinds":["H100"],"min_power":5,"min_device_mb":40960,"nodes":[["zone",["a","b"]]],"devices":["gpu0"],"prefer_kinds":["H200"]},"pool":"lab"},"submitted_at":1000000.0,"external":{"ttl_seconds":60.0,"pid":4711},"state":"pending"}',1);
INSERT INTO "event" VALUES(31,1795896271.69799,'task.started','lease',2,'red','lease','{"state":"running","fence":1,"node":"n1","admitted_at":1000000.0}',1);
INSERT INTO "event" VALUES(32,1795896271.69799,'lease.reserved','external:lease:1:0:test/n1/gpu0',1,'red','lease','{"holder_kind":"external","holder":"lease","fence":1,"device":"test/n1/gpu0","mb":5120,"tenant":"red","priority":50,"since":1000000.0,"state":"reserved","version":1,"rank":0,"context_mb":100,"overused_mb":0}',1);
INSERT INTO "event" VALUES(33,1.79589627170021963117e+09,'task.submitted','model',1,'red','model','{"id":"model","tenant":"red","name":"name of model","priority":50,"demand":{"gpus":1,"gpu_mb":5120},"submitted_at":1000000.0,"model":{"server":"triton","model":"bert","wanted_seconds":30.0,"asked_priority":60,"asked_at":1000000.0,"queued":false,"pinned":false,"yields":false,"left_at":null,"load_seconds":0.0,"usage":{"at":0.0,"counts":[0.0,0.0,0.0,0.0]},"steps":["a"],"versions":["1"],"measured":false,"address":"h:1","process":"","sized":false},"expires_at":1000009.0,"state":"pending"}',2);
INSERT INTO "event" VALUES(34,1.79589627170538616179e+09,'task.admitted','model',2,'red','model','{"state":"admitted","model":{"server":"triton","model":"bert","wanted_seconds":30.0,"asked_priority":60,"asked_at":1000000.0,"queued":false,"pinned":true,"yields":false,"left_at":1000000.0,"load_seconds":0.0,"usage":{"at":1000000.0,"counts":[1.0,1.0,1.0,1.0]},"steps":["a"],"versions":["1"],"measured":false,"address":"h:1","process":"","sized":false},"fence":1,"node":"n1","admitted_at":1000000.0}',1);
INSERT INTO "event" VALUES(35,1.79589627170538616179e+09,'lease.reserved','model:model:1:0:test/n1/gpu0',1,'red','model','{"holder_kind":"model","holder":"model","fence":1,"device":"test/n1/gpu0","mb":5120,"tenant":"red","priority":50,"since":1000000.0,"state":"reserved","version":1,"rank":0,"context_mb":100,"overused_mb":0}',1);
INSERT INTO "event" VALUES(36,1.79589627170809388156e+09,'task.submitted','inference',1,'red','inference','{"id":"inference","tenant":"red","name":"name of inference","priority":50,"demand":{"answered_by":"bert"},"submitted_at":1000000.0,"state":"pending"}',3);
INSERT INTO "event" VALUES(37,1.79589627171387434005e+09,'pledge.made','waits:test/n1/gpu0',1,'red','waits','{"preemptor":"waits","device":"test/n1/gpu0","mb":1024,"priority":80,"tenant":"red","made_at":1000000.0,"deadline_at":1000030.0,"ranks":[0,1]}',1);
INSERT INTO "event" VALUES(38,1.79589627171666502952e+09,'pledge.consumed','waits:test/n1/gpu0',1,'red','waits','{"preemptor":"waits","device":"test/n1/gpu0","mb":1024,"priority":80,"tenant":"red","made_at":1000000.0,"deadline_at":1000030.0,"ranks":[0,1]}',1);
INSERT INTO "event" VALUES(39,1.79589627172002100951e+09,'pledge.made','waits:test/n1/gpu0',1,'red','waits','{"preemptor":"waits","device":"test/n1/gpu0","mb":2048,"priority":80,"tenant":"red","made_at":1000000.0,"deadline_at":1000030.0,"ranks":[0,1]}',1);
INSERT INTO "event" VALUES(40,1.79589627172517371173e+09,'request.made','r1',1,'red','first','{"id":"r1","task":"first","tenant":"red","what":"cancel","fields":{"grace_seconds":null},"made_at":1000000.0}',1);
INSERT INTO "event" VALUES(41,1.79589627172738981243e+09,'request.made','r2',1,'red','waits','{"id":"r2","task":"waits","tenant":"red","what":"change","fields":{"priority":60,"held":false},"made_at":1000000.0}',1);
INSERT INTO "event" VALUES(42,1.79589627173263764381e+09,'request.done','r1',1,'','saved','{"task":"saved"}',1);
INSERT INTO "event" VALUES(43,1.79589627173806786536e+09,'device.seen','test/n1/gpu0',2,'',NULL,'{"key":"test/n1/gpu0","node":"n1","uuid":"gpu0","kind":"H100","index":0,"physical_mb":81920,"reserve_mb":512,"declared_foreign_mb":100,"power":2000,"context_mb":100,"simulated":false,"parent":"","split":false,"present":true,"version":2}',1);
INSERT INTO "event" VALUES(44,1.79589627173806786536e+09,'estimate.learned','x',1,'red',NULL,'{"values":[["H100","gpu_mb",5.0],["H100","seconds",5.0]]}',1);
INSERT INTO "event" VALUES(45,1.79589627174077510834e+09,'device.seen','test/n1/gpu0',3,'',NULL,'{"key":"test/n1/gpu0","node":"n1","uuid":"gpu0","kind":"H100","index":0,"physical_mb":81920,"reserve_mb":512,"declared_foreign_mb":100,"power":2000,"context_mb":100,"simulated":false,"parent":"","split":false,"present":true,"version":3}',1);
INSERT INTO "event" VALUES(46,1.79589627174077510834e+09,'estimate.forgotten','x',1,'red',NULL,'{"values":[["H100","seconds",null]]}',1);
INSERT INTO "event" VALUES(47,1.79589627174390888218e+09,'memory.fragmented','cluster',1,'',NULL,'{"waiting":3}',1);
INSERT INTO "event" VALUES(48,1.79589627175185346606e+09,'node.seen','n1',2,'',NULL,'{"name":"n1","cpu":64.0,"memory_mb":262144,"max_runs":64,"incarnation":"n1-1","boot_id":"boot-1","ready":true,"cordoned":true,"labels":[["zone","a"]],"custom":[["licence",2.0]],"version":2}',1);
INSERT INTO "event" VALUES(49,1.79589627175185346606e+09,'cordon.changed','n1',1,'',NULL,'{"cordon_reason":"broken","draining_since":1000000.0,"drain_deadline_at":null}',1);
INSERT INTO "event" VALUES(50,1.79589627175692868234e+09,'queue.paused','tenant:red',1,'red',NULL,'{"queue":"tenant:red","at":1000000.0,"actor":"olga","reason":"why"}',4);
INSERT INTO "event" VALUES(51,1.79589627175692868234e+09,'queue.paused','stream:s',1,'',NULL,'{"queue":"stream:s","at":1000000.0,"actor":"olga","reason":"why"}',4);
INSERT INTO "event" VALUES(52,1.7958962717605557441e+09,'queue.resumed','stream:s',1,'',NULL,'{"queue":"stream:s","at":1000000.0,"actor":"olga","reason":"why"}',4);
INSERT INTO "event" VALUES(53,1.7958962717654488087e+09,'stream.changed','s',1,'',NULL,'{"name":"s","curriculum":2.0,"progress":0.5,"progress_at":1000000.0,"velocity_per_hour":0.1,"data_at":1000000.0,"quality":0.9}',1);
INSERT INTO "event" VALUES(54,1.7958962717654488087e+09,'stream.changed','t',1,'',NULL,'{"name":"t","curriculum":3.0,"progress":null,"progress_at":0.0,"velocity_per_hour":0.0,"data_at":null,"quality":1.0}',1);
INSERT INTO "event" VALUES(55,1.79589627177247476578e+09,'stream.removed','t',1,'',NULL,'{"name":"t","curriculum":null,"progress":null,"progress_at":0.0,"velocity_per_hour":0.0,"data_at":null,"quality":1.0}',1);
INSERT INTO "event" VALUES(56,1.79589627178013110163e+09,'task.submitted','w1',1,'red','w1','{"id":"w1","tenant":"red","name":"name of w1","priority":50,"demand":{"gpus":1,"gpu_mb":10240,"cpu":1.5,"memory_mb":64,"custom":[["licence",1.0]],"where":{"kinds":["H100"],"min_power":5,"min_device_mb":40960,"nodes":[["zone",["a","b"]]],"devices":["gpu0"],"prefer_kinds":["H200"]},"pool":"lab"},"submitted_at":1000000.0,"array":"w1","ordered_at":1000000.0,"state":"pending"}',1);
INSERT INTO "event" VALUES(57,1.79589627178489732745e+09,'worker_set.formed','w1',1,'red',NULL,'{"id":"w1","tenant":"red","name":"set","workers":["w1"],"least":0,"most":2,"count":1,"max_concurrency":4,"created_at":1000000.0,"scaling":{"by":"calls","target":2.0,"down_after_seconds":60.0},"signal":null}',4);
INSERT INTO "event" VALUES(58,1.79589627178649020194e+09,'worker_set.changed','w1',1,'red',NULL,'{"count":2,"signal":0.5}',4);
INSERT INTO "event" VALUES(59,1.79589627178790760039e+09,'worker_set.formed','w2',1,'red',NULL,'{"id":"w2","tenant":"red","name":"set","workers":["w2"],"least":0,"most":2,"count":2,"max_concurrency":4,"created_at":1000000.0,"scaling":{"by":"calls","target":2.0,"down_after_seconds":60.0},"signal":0.5}',4);
INSERT INTO "event" VALUES(60,1.79589627179735779761e+09,'worker_set.over','w2',1,'red',NULL,'{}',4);
INSERT INTO "event" VALUES(61,1.7958962718015613556e+09,'task.changed','w1',2,'red','w1','{"state":"pending","held":true}',1);
CREATE TABLE finished (
	tenant TEXT NOT NULL, 
	state TEXT NOT NULL, 
	n INTEGER NOT NULL, 
	CONSTRAINT pk_finished PRIMARY KEY (tenant, state)
)
 WITHOUT ROWID

;
INSERT INTO "finished" VALUES('red','failed',1);
INSERT INTO "finished" VALUES('red','succeeded',1);
CREATE TABLE idle_template (
	name TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	task TEXT NOT NULL, 
	demand TEXT NOT NULL, 
	weight INTEGER NOT NULL, 
	max_running INTEGER NOT NULL, 
	token TEXT NOT NULL, 
	made_by TEXT NOT NULL, 
	made_at DOUBLE NOT NULL, 
	CONSTRAINT pk_idle_template PRIMARY KEY (name)
);
CREATE TABLE installation (
	id INTEGER NOT NULL, 
	blobs TEXT, 
	token_changes INTEGER DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_installation PRIMARY KEY (id), 
	CONSTRAINT ck_installation_one_row CHECK (id = 1)
)
 WITHOUT ROWID

;
INSERT INTO "installation" VALUES(1,NULL,1);
CREATE TABLE item_page (
	array TEXT NOT NULL, 
	first INTEGER NOT NULL, 
	page INTEGER NOT NULL, 
	tenant TEXT NOT NULL, 
	count INTEGER NOT NULL, 
	failed INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	lines BLOB NOT NULL, 
	digest TEXT, size_bytes INTEGER DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_item_page PRIMARY KEY (array, first)
);
INSERT INTO "item_page" VALUES('w1',0,1,'red',2,1,1000000.0,X'7B7D0A7B7D0A',NULL,0);
CREATE TABLE last_value (
	kind TEXT NOT NULL, 
	"key" TEXT NOT NULL, 
	revision INTEGER NOT NULL, 
	value TEXT NOT NULL, 
	CONSTRAINT pk_last_value PRIMARY KEY (kind, "key")
)
 WITHOUT ROWID

;
CREATE TABLE leadership (
	id INTEGER NOT NULL, 
	term INTEGER NOT NULL, 
	holder TEXT NOT NULL, 
	taken_at DOUBLE NOT NULL, 
	lease_until DOUBLE NOT NULL, lineage INTEGER DEFAULT 0 NOT NULL, server TEXT DEFAULT '' NOT NULL, 
	CONSTRAINT pk_leadership PRIMARY KEY (id), 
	CONSTRAINT ck_leadership_one_row CHECK (id = 1)
)
 WITHOUT ROWID

;
INSERT INTO "leadership" VALUES(1,1,'leader',1.79589627154430556297e+09,1.79589987154431939128e+09,0,'');
CREATE TABLE lease (
	holder_kind TEXT NOT NULL, 
	holder TEXT NOT NULL, 
	fence INTEGER NOT NULL, 
	rank INTEGER NOT NULL, 
	device TEXT NOT NULL, 
	mb INTEGER NOT NULL, 
	tenant TEXT NOT NULL, 
	priority INTEGER NOT NULL, 
	since DOUBLE NOT NULL, 
	state TEXT NOT NULL, 
	version INTEGER NOT NULL, 
	context_mb INTEGER NOT NULL, 
	released BOOLEAN DEFAULT 0 NOT NULL, 
	overused_mb INTEGER NOT NULL, 
	quarantined_at DOUBLE, 
	CONSTRAINT pk_lease PRIMARY KEY (holder_kind, holder, fence, rank, device), 
	CONSTRAINT ck_lease_released CHECK (released = (state = 'released')), 
	CONSTRAINT ck_lease_state CHECK (state IN ('reserved', 'held', 'releasing', 'released', 'quarantined')), 
	CONSTRAINT ck_lease_mb CHECK (mb >= 0)
)
 WITHOUT ROWID

;
INSERT INTO "lease" VALUES('external','lease',1,0,'test/n1/gpu0',5120,'red',50,1000000.0,'reserved',1,100,0,0,NULL);
INSERT INTO "lease" VALUES('gang_member','gang',1,0,'test/n1/gpu0',5120,'red',50,1000000.0,'reserved',1,100,0,0,NULL);
INSERT INTO "lease" VALUES('gang_member','gang',1,1,'test/n1/gpu0',5120,'red',50,1000000.0,'reserved',1,100,0,0,NULL);
INSERT INTO "lease" VALUES('model','model',1,0,'test/n1/gpu0',5120,'red',50,1000000.0,'reserved',1,100,0,0,NULL);
INSERT INTO "lease" VALUES('run','first',1,0,'test/n1/gpu0',5120,'red',50,1000000.0,'quarantined',4,100,0,6144,1000000.0);
INSERT INTO "lease" VALUES('run','over',1,0,'test/n1/gpu0',5120,'red',50,1000000.0,'released',3,100,1,0,NULL);
CREATE TABLE log_head (
	id INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	compatible_from INTEGER NOT NULL, 
	CONSTRAINT pk_log_head PRIMARY KEY (id), 
	CONSTRAINT ck_log_head_one_row CHECK (id = 1)
)
 WITHOUT ROWID

;
INSERT INTO "log_head" VALUES(1,61,1);
CREATE TABLE node (
	name TEXT NOT NULL, 
	cpu DOUBLE NOT NULL, 
	memory_mb INTEGER NOT NULL, 
	max_runs INTEGER NOT NULL, 
	incarnation TEXT NOT NULL, 
	boot_id TEXT NOT NULL, 
	ready BOOLEAN NOT NULL, 
	cordoned BOOLEAN NOT NULL, 
	labels TEXT NOT NULL, 
	custom TEXT NOT NULL, 
	version INTEGER NOT NULL, cordon_reason TEXT DEFAULT '' NOT NULL, draining_since DOUBLE, drain_deadline_at DOUBLE, 
	CONSTRAINT pk_node PRIMARY KEY (name)
)
 WITHOUT ROWID

;
INSERT INTO "node" VALUES('n1',64.0,262144,64,'n1-1','boot-1',1,1,'[["zone","a"]]','[["licence",2.0]]',2,'broken',1000000.0,NULL);
CREATE TABLE outcome (
	task TEXT NOT NULL, 
	fence INTEGER NOT NULL, 
	tenant TEXT NOT NULL, 
	ending TEXT NOT NULL, 
	at DOUBLE NOT NULL, 
	result BLOB, 
	result_digest TEXT, 
	result_format TEXT NOT NULL, 
	failure TEXT, 
	log_tail BLOB NOT NULL, 
	CONSTRAINT pk_outcome PRIMARY KEY (task, fence)
);
INSERT INTO "outcome" VALUES('first',1,'red','failed',1000000.0,NULL,NULL,'json','{"kind":"exception","message":"as written","traceback":"trace"}',X'');
INSERT INTO "outcome" VALUES('over',1,'red','succeeded',1000000.0,X'3432',NULL,'json',NULL,X'7461696C');
CREATE TABLE pledge (
	preemptor TEXT NOT NULL, 
	device TEXT NOT NULL, 
	mb INTEGER NOT NULL, 
	priority INTEGER NOT NULL, 
	tenant TEXT NOT NULL, 
	made_at DOUBLE NOT NULL, 
	deadline_at DOUBLE NOT NULL, 
	ranks TEXT NOT NULL, 
	CONSTRAINT pk_pledge PRIMARY KEY (preemptor, device)
)
 WITHOUT ROWID

;
INSERT INTO "pledge" VALUES('waits','test/n1/gpu0',2048,80,'red',1000000.0,1000030.0,'[0,1]');
CREATE TABLE queue_pause (
	queue TEXT NOT NULL, 
	at DOUBLE NOT NULL, 
	actor TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	CONSTRAINT pk_queue_pause PRIMARY KEY (queue)
);
INSERT INTO "queue_pause" VALUES('tenant:red',1000000.0,'olga','why');
CREATE TABLE relocation (
	id INTEGER NOT NULL, 
	move TEXT NOT NULL, 
	stage TEXT NOT NULL, 
	other TEXT NOT NULL, 
	at DOUBLE NOT NULL, 
	CONSTRAINT pk_relocation PRIMARY KEY (id), 
	CONSTRAINT ck_relocation_one_row CHECK (id = 1), 
	CONSTRAINT ck_relocation_stage CHECK (stage IN ('leaving', 'coming', 'gone', 'here'))
);
CREATE TABLE request (
	id TEXT NOT NULL, 
	task TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	what TEXT NOT NULL, 
	fields TEXT NOT NULL, 
	made_at DOUBLE NOT NULL, 
	CONSTRAINT pk_request PRIMARY KEY (id)
)
 WITHOUT ROWID

;
INSERT INTO "request" VALUES('r2','waits','red','change','{"priority":60,"held":false}',1000000.0);
CREATE TABLE run_log (
	task TEXT NOT NULL, 
	fence INTEGER NOT NULL, 
	rank INTEGER NOT NULL, 
	stream TEXT NOT NULL, 
	first_byte INTEGER NOT NULL, 
	size_bytes INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	tenant TEXT NOT NULL, 
	data BLOB, 
	digest TEXT, 
	CONSTRAINT pk_run_log PRIMARY KEY (task, fence, rank, stream, first_byte)
);
CREATE TABLE stored_object (
	tenant TEXT NOT NULL, 
	digest TEXT NOT NULL, 
	size_bytes INTEGER NOT NULL, 
	created_at DOUBLE NOT NULL, 
	expires_at DOUBLE NOT NULL, 
	CONSTRAINT pk_stored_object PRIMARY KEY (tenant, digest)
);
CREATE TABLE task (
	id TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	name TEXT NOT NULL, 
	priority INTEGER NOT NULL, 
	demand TEXT NOT NULL, 
	submitted_at DOUBLE NOT NULL, 
	max_retries INTEGER NOT NULL, 
	timeout_seconds DOUBLE, 
	grace_seconds DOUBLE NOT NULL, 
	shareable BOOLEAN NOT NULL, 
	"after" TEXT NOT NULL, 
	queue_ttl_seconds DOUBLE, 
	deadline_at DOUBLE, 
	expected_seconds DOUBLE, 
	stream TEXT NOT NULL, 
	subject TEXT NOT NULL, 
	external TEXT, 
	state TEXT DEFAULT 'pending' NOT NULL, 
	version INTEGER DEFAULT 1 NOT NULL, 
	fence INTEGER DEFAULT 0 NOT NULL, 
	held BOOLEAN NOT NULL, 
	awaits BOOLEAN NOT NULL, 
	failed_by TEXT, 
	expires_at DOUBLE, 
	not_before DOUBLE, 
	failures INTEGER DEFAULT 0 NOT NULL, 
	preemptions INTEGER DEFAULT 0 NOT NULL, 
	node TEXT, 
	admitted_at DOUBLE, 
	started_at DOUBLE, 
	checkpoint_at DOUBLE, 
	finished_at DOUBLE, 
	stop_reason TEXT, 
	stop_deadline_at DOUBLE, 
	freeing_for TEXT, 
	members TEXT, 
	finished BOOLEAN DEFAULT 0 NOT NULL, 
	ended_as TEXT, 
	idem_key TEXT, 
	body_hash TEXT, model TEXT, home TEXT, queued_bytes INTEGER DEFAULT 0 NOT NULL, ordered_at DOUBLE, array TEXT, 
	CONSTRAINT pk_task PRIMARY KEY (id), 
	CONSTRAINT ck_task_finished CHECK (finished = (state IN ('cancelled', 'expired', 'failed', 'succeeded'))), 
	CONSTRAINT ck_task_state CHECK (state IN ('pending', 'admitted', 'running', 'stopping', 'succeeded', 'failed', 'cancelled', 'expired'))
)
 WITHOUT ROWID

;
INSERT INTO "task" VALUES('again','red','name of again',50,'{"gpus":1,"gpu_mb":10240,"cpu":1.5,"memory_mb":64,"custom":[["licence",1.0]],"where":{"kinds":["H100"],"min_power":5,"min_device_mb":40960,"nodes":[["zone",["a","b"]]],"devices":["gpu0"],"prefer_kinds":["H200"]},"pool":"lab"}',1000000.0,0,NULL,30.0,1,'[]',NULL,NULL,NULL,'','',NULL,'pending',3,1,0,0,NULL,NULL,1000060.0,1,1,NULL,1000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,'key of again','hash',NULL,NULL,0,NULL,NULL);
INSERT INTO "task" VALUES('first','red','name of first',50,'{"gpus":1,"gpu_mb":10240,"cpu":1.5,"memory_mb":64,"custom":[["licence",1.0]],"where":{"kinds":["H100"],"min_power":5,"min_device_mb":40960,"nodes":[["zone",["a","b"]]],"devices":["gpu0"],"prefer_kinds":["H200"]},"pool":"lab"}',1000000.0,2,60.0,30.0,0,'[]',NULL,2000000.0,NULL,'s','x',NULL,'failed',6,1,0,0,NULL,1000005.0,NULL,0,0,'n1',1000000.0,1000002.0,1000003.0,1000009.0,'preempt',1000030.0,'waits',NULL,1,'failed','key of first','hash',NULL,NULL,7,NULL,NULL);
INSERT INTO "task" VALUES('gang','red','name of gang',50,'{"slots":[["tenant:red",1.0]],"bundles":[{"gpus":1,"gpu_mb":5120},{"gpus":1,"gpu_mb":5120}],"strategy":"spread","min_ranks":1}',1000000.0,0,NULL,30.0,0,'[]',NULL,NULL,NULL,'','',NULL,'running',4,1,0,0,NULL,NULL,NULL,0,0,'n1',1000000.0,1000000.0,NULL,NULL,NULL,NULL,NULL,'[[0,"n1","ready",false,"127.0.0.1:9"],[1,"n1","leaving",true,"127.0.0.1:8","waits",1000030.0],[2,"n1","placed",false,"",null,1000009.0,1]]',0,NULL,'key of gang','hash',NULL,NULL,0,NULL,NULL);
INSERT INTO "task" VALUES('inference','red','name of inference',50,'{"answered_by":"bert"}',1000000.0,0,NULL,30.0,0,'[]',NULL,NULL,NULL,'','',NULL,'pending',1,0,0,0,NULL,NULL,NULL,0,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,'key of inference','hash',NULL,NULL,0,NULL,NULL);
INSERT INTO "task" VALUES('lease','red','name of lease',50,'{"gpus":1,"gpu_mb":10240,"cpu":1.5,"memory_mb":64,"custom":[["licence",1.0]],"where":{"kinds":["H100"],"min_power":5,"min_device_mb":40960,"nodes":[["zone",["a","b"]]],"devices":["gpu0"],"prefer_kinds":["H200"]},"pool":"lab"}',1000000.0,0,NULL,30.0,0,'[]',NULL,NULL,NULL,'','','{"ttl_seconds":60.0,"pid":4711}','running',2,1,0,0,NULL,NULL,NULL,0,0,'n1',1000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,'key of lease','hash',NULL,NULL,0,NULL,NULL);
INSERT INTO "task" VALUES('model','red','name of model',50,'{"gpus":1,"gpu_mb":5120}',1000000.0,0,NULL,30.0,0,'[]',NULL,NULL,NULL,'','',NULL,'admitted',2,1,0,0,NULL,1000009.0,NULL,0,0,'n1',1000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,'key of model','hash','{"server":"triton","model":"bert","wanted_seconds":30.0,"asked_priority":60,"asked_at":1000000.0,"queued":false,"pinned":true,"yields":false,"left_at":1000000.0,"load_seconds":0.0,"usage":{"at":1000000.0,"counts":[1.0,1.0,1.0,1.0]},"steps":["a"],"versions":["1"],"measured":false,"address":"h:1","process":"","sized":false}','triton/bert',0,NULL,NULL);
INSERT INTO "task" VALUES('over','red','name of over',50,'{"gpus":1,"gpu_mb":10240,"cpu":1.5,"memory_mb":64,"custom":[["licence",1.0]],"where":{"kinds":["H100"],"min_power":5,"min_device_mb":40960,"nodes":[["zone",["a","b"]]],"devices":["gpu0"],"prefer_kinds":["H200"]},"pool":"lab"}',1000000.0,0,NULL,30.0,0,'[]',NULL,NULL,NULL,'','',NULL,'succeeded',4,1,0,0,NULL,NULL,NULL,0,0,'n1',1000000.0,1000000.0,NULL,1000000.0,NULL,NULL,NULL,NULL,1,'succeeded','key of over','hash',NULL,NULL,0,NULL,NULL);
INSERT INTO "task" VALUES('w1','red','name of w1',50,'{"gpus":1,"gpu_mb":10240,"cpu":1.5,"memory_mb":64,"custom":[["licence",1.0]],"where":{"kinds":["H100"],"min_power":5,"min_device_mb":40960,"nodes":[["zone",["a","b"]]],"devices":["gpu0"],"prefer_kinds":["H200"]},"pool":"lab"}',1000000.0,0,NULL,30.0,0,'[]',NULL,NULL,NULL,'','',NULL,'pending',2,0,1,0,NULL,NULL,NULL,0,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,'key of w1','hash',NULL,NULL,0,1000000.0,'w1');
INSERT INTO "task" VALUES('waits','red','name of waits',50,'{"gpus":1,"gpu_mb":10240,"cpu":1.5,"memory_mb":64,"custom":[["licence",1.0]],"where":{"kinds":["H100"],"min_power":5,"min_device_mb":40960,"nodes":[["zone",["a","b"]]],"devices":["gpu0"],"prefer_kinds":["H200"]},"pool":"lab"}',1000000.0,0,NULL,30.0,0,'[["first","fail"],["gone","ignore"]]',NULL,NULL,NULL,'','',NULL,'pending',1,0,1,1,NULL,NULL,NULL,0,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,0,NULL,'key of waits','hash',NULL,NULL,0,NULL,NULL);
CREATE TABLE task_label (
	tenant TEXT NOT NULL, 
	"key" TEXT NOT NULL, 
	value TEXT NOT NULL, 
	task TEXT NOT NULL, 
	CONSTRAINT pk_task_label PRIMARY KEY (tenant, "key", value, task)
)
 WITHOUT ROWID

;
INSERT INTO "task_label" VALUES('red','team','x','again');
INSERT INTO "task_label" VALUES('red','team','x','first');
INSERT INTO "task_label" VALUES('red','team','x','gang');
INSERT INTO "task_label" VALUES('red','team','x','inference');
INSERT INTO "task_label" VALUES('red','team','x','lease');
INSERT INTO "task_label" VALUES('red','team','x','model');
INSERT INTO "task_label" VALUES('red','team','x','over');
INSERT INTO "task_label" VALUES('red','team','x','w1');
INSERT INTO "task_label" VALUES('red','team','x','waits');
CREATE TABLE task_spec (
	task TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	entrypoint TEXT NOT NULL, 
	command TEXT NOT NULL, 
	arguments BLOB NOT NULL, 
	arguments_digest TEXT, 
	python TEXT NOT NULL, 
	env TEXT NOT NULL, 
	result_format TEXT NOT NULL, 
	labels TEXT NOT NULL, 
	model_type TEXT NOT NULL, 
	working_directory TEXT NOT NULL, 
	sizing TEXT, objects TEXT DEFAULT '[]' NOT NULL, 
	CONSTRAINT pk_task_spec PRIMARY KEY (task)
);
INSERT INTO "task_spec" VALUES('first','red','entrypoint','jobs:run','[]',X'',NULL,'','{"A":"b"}','json','{"team":"x"}','','',NULL,'[]');
INSERT INTO "task_spec" VALUES('waits','red','entrypoint','jobs:run','[]',X'',NULL,'','{}','json','{"team":"x"}','','',NULL,'[]');
INSERT INTO "task_spec" VALUES('again','red','entrypoint','jobs:run','[]',X'',NULL,'','{}','json','{"team":"x"}','','',NULL,'[]');
INSERT INTO "task_spec" VALUES('over','red','entrypoint','jobs:run','[]',X'',NULL,'','{}','json','{"team":"x"}','','',NULL,'[]');
INSERT INTO "task_spec" VALUES('gang','red','entrypoint','jobs:run','[]',X'',NULL,'','{}','json','{"team":"x"}','','',NULL,'[]');
INSERT INTO "task_spec" VALUES('lease','red','external','jobs:run','[]',X'',NULL,'','{}','json','{"team":"x"}','','',NULL,'[]');
INSERT INTO "task_spec" VALUES('model','red','model','jobs:run','[]',X'',NULL,'','{}','json','{"team":"x"}','','',NULL,'[]');
INSERT INTO "task_spec" VALUES('inference','red','inference','jobs:run','[]',X'',NULL,'','{}','json','{"team":"x"}','','',NULL,'[]');
INSERT INTO "task_spec" VALUES('w1','red','entrypoint','jobs:run','[]',X'',NULL,'','{}','json','{"team":"x"}','','',NULL,'["object"]');
CREATE TABLE token (
	name TEXT NOT NULL, 
	sha256 TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	scopes TEXT NOT NULL, 
	max_priority INTEGER NOT NULL, 
	created_at DOUBLE NOT NULL, 
	expires_at DOUBLE, 
	CONSTRAINT pk_token PRIMARY KEY (name), 
	CONSTRAINT uq_token_sha256 UNIQUE (sha256)
);
INSERT INTO "token" VALUES('ci','hash','red','["tasks:read"]',50,1000000.0,NULL);
CREATE TABLE usage (
	tenant TEXT NOT NULL, 
	held_mb INTEGER NOT NULL, 
	mb_seconds DOUBLE NOT NULL, 
	at DOUBLE NOT NULL, 
	CONSTRAINT pk_usage PRIMARY KEY (tenant)
)
 WITHOUT ROWID

;
INSERT INTO "usage" VALUES('red',25600,1.0053194724044146824e+03,1.79589627170538616179e+09);
CREATE TABLE work_stream (
	name TEXT NOT NULL, 
	curriculum DOUBLE, 
	progress DOUBLE, 
	progress_at DOUBLE NOT NULL, 
	velocity_per_hour DOUBLE NOT NULL, 
	data_at DOUBLE, 
	quality DOUBLE NOT NULL, 
	CONSTRAINT pk_work_stream PRIMARY KEY (name)
);
INSERT INTO "work_stream" VALUES('s',2.0,0.5,1000000.0,0.1,1000000.0,0.9);
CREATE TABLE worker_set (
	id TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	fields TEXT NOT NULL, 
	CONSTRAINT pk_worker_set PRIMARY KEY (id)
);
INSERT INTO "worker_set" VALUES('w1','red','{"id":"w1","tenant":"red","name":"set","workers":["w1"],"least":0,"most":2,"count":2,"max_concurrency":4,"created_at":1000000.0,"scaling":{"by":"calls","target":2.0,"down_after_seconds":60.0},"signal":0.5}');
CREATE INDEX ix_task_dependent ON task (tenant, id) WHERE after <> '[]';
CREATE INDEX ix_task_finished ON task (tenant, ended_as, id) WHERE finished = 1;
CREATE INDEX ix_task_tenant_id ON task (tenant, id);
CREATE UNIQUE INDEX ix_task_tenant_idem_key ON task (tenant, idem_key) WHERE idem_key IS NOT NULL;
CREATE INDEX ix_task_unfinished ON task (tenant, id) WHERE finished = 0;
CREATE INDEX ix_task_external ON task (tenant, id) WHERE external IS NOT NULL;
CREATE INDEX ix_task_spec_arguments_digest ON task_spec (arguments_digest) WHERE arguments_digest IS NOT NULL;
CREATE INDEX ix_outcome_result_digest ON outcome (result_digest) WHERE result_digest IS NOT NULL;
CREATE INDEX ix_checkpoint_digest ON checkpoint (digest);
CREATE INDEX ix_lease_unreleased ON lease (holder) WHERE released = 0;
CREATE INDEX ix_event_task_position ON event (task, position) WHERE task IS NOT NULL;
CREATE INDEX ix_task_finished_at ON task (finished_at) WHERE finished = 1;
CREATE UNIQUE INDEX ix_task_home ON task (home) WHERE home IS NOT NULL AND finished = 0;
CREATE INDEX ix_stored_object_digest ON stored_object (digest);
CREATE INDEX ix_stored_object_expires_at ON stored_object (expires_at);
CREATE INDEX ix_run_log_digest ON run_log (digest) WHERE digest IS NOT NULL;
CREATE INDEX ix_item_page_digest ON item_page (digest) WHERE digest IS NOT NULL;
CREATE INDEX ix_item_page_counts ON item_page (array, page, count, failed, at, size_bytes);
COMMIT;
